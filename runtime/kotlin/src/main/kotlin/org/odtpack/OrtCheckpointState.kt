package org.odtpack

import ai.onnxruntime.*
import java.io.File
import java.nio.ByteBuffer
import java.nio.file.Path

/** Values that a user attaches to a training: saved with it. */
abstract class Properties internal constructor() {
    internal abstract val values: MutableMap<String, Any>

    /** Make a call that no other may run beside. */
    internal abstract fun <T> own(body: () -> T): T

    @Throws(OrtException::class)
    fun addProperty(name: String, value: Long) = setProperty(name, value)

    @Throws(OrtException::class)
    fun addProperty(name: String, value: Int) = setProperty(name, value.toLong())

    @Throws(OrtException::class)
    fun addProperty(name: String, value: Float) = setProperty(name, value)

    @Throws(OrtException::class)
    fun addProperty(name: String, value: String) = setProperty(name, value)

    @Throws(OrtException::class)
    fun getIntProperty(name: String): Int = getLongProperty(name).let {
        if (it == it.toInt().toLong()) it.toInt()
        else fail("property-out-of-range", "'$name' is $it.", "call getLongProperty")
    }

    @Throws(OrtException::class)
    fun getLongProperty(name: String): Long = property(name)

    @Throws(OrtException::class)
    fun getFloatProperty(name: String): Float = property(name)

    @Throws(OrtException::class)
    fun getStringProperty(name: String): String = property(name)

    private fun setProperty(name: String, value: Any) = own {
        if (name.isEmpty()) fail("property-type", "A property needs a name.")
        if (name == OPTIMIZER_PROPERTY) {
            fail("property-type", "'$name' is reserved: files keep the optimizer's kind there.")
        }
        if (!isUnicode(name) || value is String && !isUnicode(value)) {
            fail("property-not-text", "A property's name and its text must be Unicode.")
        }
        values[name] = value
    }

    private inline fun <reified T> property(name: String): T = own {
        val value = values[name] ?: fail("unknown-property", "The state has no property '$name'.")
        value as? T ?: fail("property-type", "The property '$name' is '$value'.")
    }
}

/**
 * The state of a training: parameters, properties, and what the optimizer carries. Sessions that
 * are made of it train its memory, and while a call of one runs, calls of the state are `busy`.
 */
class OrtCheckpointState internal constructor(internal val state: State) : Properties() {
    /** True as long as the parameters have names and no values. */
    val isNominal get() = state.nominal

    /**
     * True if the file carried a digest of all that it holds, which was right. Those of ONNX
     * Runtime's own training carry none, and load unchecked.
     */
    val isChecked get() = state.checked

    /**
     * What is wrong with the file that was to be loaded, and what was lost, if the save before it
     * was loaded instead.
     */
    val recovered: String? get() = state.recovered

    val parameterNames: Set<String> get() = state.parameters.keys.toSortedSet()
    val propertyNames: Set<String> get() = state.properties.keys.toSortedSet()

    /**
     * Save to one file, whole or not at all. With the optimizer's state, training goes on from it
     * bit by bit; accumulated gradients are not in it: save after `optimizerStep`.
     *
     * @param keepPrevious Keep the file that is replaced as `<path>.previous`, which
     *   [loadCheckpoint] goes back to if this one comes to harm. A file that this state neither was
     *   loaded from nor saved is read first: one that is not whole is replaced, and the save before
     *   it stays.
     * @throws OdtpackException `file-not-written`; the new file is in place if the message says that
     *   it was written, but may not survive a power cut.
     */
    @JvmOverloads @Throws(OrtException::class)
    fun saveCheckpoint(path: String, includeOptimizerState: Boolean, keepPrevious: Boolean = false) = own {
        uninterrupted { Save(path, state, includeOptimizerState, keepPrevious).write() }
    }

    @JvmOverloads @Throws(OrtException::class)
    fun saveCheckpoint(path: Path, includeOptimizerState: Boolean, keepPrevious: Boolean = false) =
        saveCheckpoint(path.toString(), includeOptimizerState, keepPrevious)

    /** The parameter itself, not a copy: it shows the training's progress. Close it after use. */
    @Throws(OrtException::class)
    fun getParameter(env: OrtEnvironment, name: String): OnnxTensor = own {
        state.requireValues()
        state.value(name).onnx(env)
    }

    @Throws(OrtException::class)
    fun updateParameter(name: String, value: OnnxTensor) = own {
        state.requireValues()
        val target = state.value(name)
        if (value.isClosed) fail("parameter-type", "The new value of '$name' is closed.")
        val same = value.info.onnxType == target.type.onnx
        if (!same || !value.shape.contentEquals(target.shape)) {
            fail(if (same) "parameter-shape" else "parameter-type",
                "Parameter '$name' is ${target.description}, unlike the new value.")
        }
        target.copyFrom(value.byteBuffer)
    }

    /** Set all parameters to those of a complete checkpoint of the same model. */
    @Throws(OrtException::class)
    fun loadParameters(path: String) = own {
        val other = readCheckpoint(path)
        other.requireValues()
        val free = state.nominal && state.flat == null // shapes are not known yet
        val same = state.parameters.keys == other.parameters.keys && state.parameters.all { (name, own) ->
            val theirs = other.value(name)
            own.value.type == theirs.type && (free || own.value.shape.contentEquals(theirs.shape))
        }
        if (!same) {
            fail("checkpoint-mismatch", "The checkpoint has other parameters than this state.",
                "load a checkpoint of the same model", path)
        }
        for ((name, own) in state.parameters) {
            val value = other.value(name)
            if (free) own.value = value else own.value.copyFrom(value.bytes())
        }
        state.nominal = false
    }

    /**
     * Write the adapter that was trained, of one model or of segments.
     *
     * @param pack The package that the state belongs to.
     * @param path A name that ends in `.onnx_adapter` for a file of ONNX Runtime's own adapters, or
     *   a folder for PEFT's two files; made if needed.
     * @throws OdtpackException `no-adapter`; `peft-without-kind` if PEFT has no place for what is
     *   trained; `file-not-written`.
     */
    @Throws(OrtException::class)
    fun saveAdapter(pack: TrainingPackage, path: String) = own { writeAdapter(pack, state, File(path)) }

    /**
     * Set the trained parameters to those of such a file or folder, all of them or none. What the
     * optimizer carries stays as it is.
     *
     * @throws OdtpackException `adapter-not-found`, `adapter-corrupt`, `peft-not-found`, `peft-invalid` or
     *   `peft-unsupported` if it cannot be read, `adapter-mismatch` if it does not fit.
     */
    @Throws(OrtException::class)
    fun loadAdapter(pack: TrainingPackage, path: String) = own { readAdapter(pack, state, File(path)) }

    override fun <T> own(body: () -> T): T = state.turn.take(body)

    override val values get() = state.properties

    companion object {
        /**
         * Load a checkpoint of odtpack or of ONNX Runtime training 1.17 to 1.19. If it is damaged
         * or missing and the save before it was kept, that one is loaded; [recovered] then says so.
         */
        @JvmStatic @Throws(OrtException::class)
        fun loadCheckpoint(path: String) = OrtCheckpointState(readLastGood(path))

        @JvmStatic @Throws(OrtException::class)
        fun loadCheckpoint(path: Path) = loadCheckpoint(path.toString())

        @JvmStatic @Throws(OrtException::class)
        fun loadCheckpoint(bytes: ByteBuffer) = OrtCheckpointState(CheckpointReader(bytes, "the buffer").read())

        /**
         * Bring trained parameters into the state of a newer package's checkpoint, before a session
         * is made of it; everything else comes from the newer one, which an error leaves as it is.
         *
         * @param names Those that were trained by default. Running statistics must be named.
         * @param optimizerState Also take over step count, learning rate, its schedule and moments;
         *     those of parameters that are not taken over are zero.
         */
        @JvmStatic @JvmOverloads @Throws(OrtException::class)
        fun carryOver(
            trained: OrtCheckpointState,
            fresh: OrtCheckpointState,
            names: Collection<String>? = null,
            optimizerState: Boolean = true,
        ) = trained.own { fresh.own { carry(trained.state, fresh.state, names, optimizerState) } }

        private fun carry(from: State, to: State, names: Collection<String>?, optimizerState: Boolean) {
            from.requireValues()
            to.requireValues()
            if (to.flat != null) {
                fail("busy", "A session is training this state.", "carry over before a session is made of it")
            }
            val same = { name: String ->
                val (one, two) = Pair(from.parameters[name]?.value, to.parameters[name]?.value)
                one != null && two != null && one.type == two.type && one.shape.contentEquals(two.shape)
            }
            val chosen = names ?: from.parameters.filterValues { it.trainable }.keys
            chosen.find { !same(it) }?.let {
                fail("carry-over-parameter", "'$it' does not go over: it is missing, or has another shape or type.",
                    "odtpack diff OLD NEW says what goes over")
            }
            val old = from.optimizer.takeIf { optimizerState }
            val owners = to.parameters.filterValues { it.trainable }.keys
                .takeUnless { old == null || old.moments.isEmpty() }.orEmpty()
            val moments = owners.associateWith { name ->
                old!!.moments[name]?.takeIf { same(name) }
                    ?.map { if (name in chosen) it.copy() else zeros(it.type, it.shape) }
                    ?: fail("carry-over-optimizer", "There is no optimizer state for '$name'.",
                        "carryOver(trained, fresh, names, false)")
            }
            for (name in chosen) to.value(name).copyFrom(from.value(name).bytes())
            to.properties.putAll(from.properties.filterKeys { optimizerState || it != SCHEDULE_PROPERTY })
            to.optimizer =
                old?.let { OptimizerState(it.step, it.rate, moments, listOf(moments.keys.toList()), it.kind) }
        }
    }
}
