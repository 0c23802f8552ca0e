package org.odtpack

import java.io.File
import java.io.FileNotFoundException
import java.io.IOException
import java.io.RandomAccessFile
import java.nio.ByteBuffer
import java.nio.ByteOrder
import org.odtpack.fbs.Checkpoint
import org.odtpack.fbs.PropertyBag
import org.odtpack.fbs.Tensor as Table

internal fun readCheckpoint(path: String): State {
    try {
        return CheckpointReader(map(File(path)), path, File("$path.data"), true).read()
    } catch (error: IOException) {
        val missing = error is FileNotFoundException && !File(path).exists()
        fail(
            if (missing) "checkpoint-not-found" else "checkpoint-unreadable",
            "The checkpoint cannot be read: ${error.message}.", path,
        )
    }
}

/** What the save before can help against. */
private val HARMED = setOf(
    "checkpoint-corrupt", "checkpoint-not-found", "checkpoint-unreadable", "checkpoint-version",
    "checkpoint-dtype",
)

/** Read a checkpoint, or the one before it if it is damaged or missing. */
internal fun readLastGood(path: String): State {
    try {
        return readCheckpoint(path)
    } catch (error: OdtpackException) {
        val before = previousPath(path)
        if (error.errorCode !in HARMED || !File(before).isFile) throw error
        val state = try {
            readCheckpoint(before)
        } catch (_: OdtpackException) {
            throw error
        }
        val step = state.optimizer?.step ?: 0
        val last = stepIn(File(path)) ?: 0
        val lost = if (last > step) "${last - step} optimizer steps made since are lost"
        else "what was trained since is lost"
        state.recovered = "${error.message}\nThe save before it was loaded, $before, of optimizer " +
            "step $step: $lost."
        state.damaged = path
        return state
    }
}

/** The optimizer step of a damaged file, if it can still be read. */
private fun stepIn(file: File): Long? = try {
    CheckpointReader(map(file), file.path, null, false).read().optimizer?.step
} catch (_: IOException) {
    null
} catch (_: OdtpackException) {
    null
}

/** Reads one file; without [values], tensors are described and have no memory. */
internal class CheckpointReader(
    bytes: ByteBuffer,
    private val where: String,
    private val dataFile: File?,
    private val values: Boolean,
) {
    /** Lowest offset in the data file, after [read]. */
    var firstExternal = Long.MAX_VALUE
        private set
    private val bytes = bytes.slice().order(ByteOrder.LITTLE_ENDIAN)
    private val size = bytes.remaining().toLong()
    private var data: RandomAccessFile? = null
    private var inlineLeft = size
    private var externalLeft = if (values) 0L else Long.MAX_VALUE
    private var textLeft = size
    private var outline = Outline(false)
    private val said = ArrayList<Pair<String, String>>() // tensors, and the digests of the file

    fun read(): State = try {
        readState()
    } catch (error: IndexOutOfBoundsException) { // buffers check each access, and their limits
        corrupt("its offsets lead out of the file")
    } catch (error: IllegalArgumentException) {
        corrupt("its offsets or its text are not valid")
    } finally {
        data?.close()
    }

    private fun readState(): State {
        check(size >= 8 && Checkpoint.CheckpointBufferHasIdentifier(bytes)) {
            "it does not carry the identifier ODTC"
        }
        val root = Checkpoint.getRootAsCheckpoint(bytes)
        if (root.version() != 2) fail("checkpoint-version", "It is not of version 2.", where)
        val module = root.moduleState() ?: corrupt("it has no module state")
        val state = State(module.isNominalState)
        if (module.hasExternalData() && values) {
            val file = dataFile?.takeIf { it.isFile && !isLink(it) }
                ?: corrupt("it has no data file")
            data = RandomAccessFile(file, "r")
            externalLeft = file.length()
        }
        outline = Outline(state.nominal)
        val count = module.requiresGradParamsLength()
        val trainable = tensors(count, state, module::requiresGradParams)
        val frozen = tensors(module.frozenParamsLength(), state, module::frozenParams)
        trainable.mapValuesTo(state.parameters) { Parameter(it.value, true) }
        for ((name, value) in frozen) {
            check(name !in trainable) { "parameter '$name' is both trainable and frozen" }
            state.parameters[name] = Parameter(value, false)
        }
        properties(root.propertyBag(), state)
        val properties = LinkedHashMap(state.properties) // with the optimizer's kind
        outline.int(root.optimizerGroupsLength())
        if (root.optimizerGroupsLength() > 0) state.optimizer = optimizer(root, state)
        outline.properties(properties)
        if (values) state.checked = checkDigest(root)
        return state
    }

    /** Compare with the digests that the file carries; false if it carries none. */
    private fun checkDigest(root: Checkpoint): Boolean {
        val whole = text(root.digestAsByteBuffer(), root::digest)
        val marked = said.any { (_, digest) -> digest.startsWith(DIGEST_PREFIX) }
        if (whole.isEmpty() && !marked) return false
        val digests = outline.digests()
        if (whole == digests.last()) return true
        val odd = said.filterIndexed { i, (_, digest) -> marked && digest != digests[i] }
        val what = odd.joinToString { (name, _) -> "'$name'" }
            .ifEmpty { "its names, shapes, optimizer state or properties" }
        corrupt("what is stored is not what was saved: $what")
    }

    private fun corrupt(reason: String): Nothing = fail(
        "checkpoint-corrupt", "It is not a readable checkpoint: $reason.", where,
        "copy or download the file again, or fall back to an earlier one",
    )

    private inline fun check(good: Boolean, reason: () -> String) {
        if (!good) corrupt(reason())
    }

    private fun text(raw: ByteBuffer?, read: () -> String?): String {
        check(raw == null || raw.limit() < size) { "a text has no end" } // a zero byte ends it
        textLeft -= raw?.remaining() ?: 0
        check(textLeft >= 0) { "its strings overlap" } // one may be referred to many times
        return read() ?: ""
    }

    private fun tensors(
        count: Int,
        state: State,
        read: (Int) -> Table,
        of: String = "",
    ): Map<String, Tensor> {
        val tensors = LinkedHashMap<String, Tensor>()
        outline.int(maxOf(count, 0))
        for (i in 0 until count) {
            val table = read(i)
            val name = text(table.nameAsByteBuffer(), table::name)
            check(name.isNotEmpty() && name !in tensors) { "a name is empty or occurs twice" }
            val tensor = tensor(name, table, state.nominal)
            tensors[name] = tensor
            outline.tensor(name, tensor)
            if (!values || state.nominal) continue
            val digest = text(table.docStringAsByteBuffer(), table::docString)
            said.add(Pair(if (of.isEmpty()) name else "$name of $of", digest))
        }
        return tensors
    }

    private fun tensor(name: String, table: Table, nominal: Boolean): Tensor {
        val type = Type.of(table.dataType()) ?: fail(
            "checkpoint-dtype",
            "'$name' has elements of ONNX type ${table.dataType()}, which are not supported.",
            where,
        )
        check(table.dimsLength() in 0..32) { "'$name' has an impossible rank" }
        val shape = LongArray(table.dimsLength(), table::dims)
        val most = shape.fold(1.0) { most, each -> most * maxOf(each, 1) }
        check(shape.all { it >= 0 } && most <= 1L shl 48) { "'$name' has an impossible shape" }
        check(table.stringDataLength() == 0) { "'$name' holds strings" }
        val raw: ByteBuffer? = table.rawDataAsByteBuffer()
        val stored = (raw?.remaining() ?: 0).toLong()
        val offset = table.externalDataOffset()
        if (nominal) {
            check(shape.isEmpty() && stored == 0L && offset == -1L) { "it is nominal, with values" }
            return Tensor(type, longArrayOf(0), NOTHING)
        }
        val length = shape.fold(type.size.toLong(), Long::times)
        val inside = offset == -1L
        check(stored == if (inside) length else 0L) { "the shape of '$name' is not its size" }
        if (inside) inlineLeft -= length else externalLeft -= length
        check(inlineLeft >= 0 && externalLeft >= 0) { "its tensors overlap" }
        if (!inside) firstExternal = minOf(firstExternal, offset)
        if (!values) return Tensor(type, shape, NOTHING)
        val tensor = zeros(type, shape)
        val opened = data
        if (inside) {
            if (raw != null) tensor.copyFrom(raw)
        } else {
            check(opened != null && offset >= 0 && offset <= opened.length() - length) {
                "'$name' lies outside of its data file"
            }
            val target = tensor.bytes()
            while (target.hasRemaining()) {
                val got = opened!!.channel.read(target, offset + target.position())
                check(got > 0) { "its data file became shorter" }
            }
        }
        val all = 0 until length.toInt()
        check(type != Type.BOOL || all.all { tensor.data.get(it) in 0..1 }) {
            "'$name' holds bools that are neither 0 nor 1"
        }
        return tensor
    }

    private fun optimizer(root: Checkpoint, state: State): OptimizerState {
        val first = root.optimizerGroups(0)
        val rate = first.initialLearningRate()
        check(first.step() >= 0 && rate.isFinite()) { "its optimizer's step or rate" }
        val moments = LinkedHashMap<String, List<Tensor>>()
        val groups = List(root.optimizerGroupsLength()) { index ->
            val group = root.optimizerGroups(index)
            val name = text(group.groupNameAsByteBuffer(), group::groupName)
            check(
                name == "group$index" && group.step() == first.step() &&
                    group.initialLearningRate() == rate,
            ) { "its optimizer groups have other names, or stand at different steps or rates" }
            outline.text(name)
            outline.long(group.step())
            outline.float(group.initialLearningRate())
            outline.int(group.optimizerStatesLength())
            List(maxOf(group.optimizerStatesLength(), 0)) { i ->
                val entry = group.optimizerStates(i)
                val of = text(entry.paramNameAsByteBuffer(), entry::paramName)
                val owner = state.parameters[of]
                check(owner != null && owner.trainable && of !in moments) {
                    "the optimizer state of '$of' occurs twice or belongs to no parameter"
                }
                outline.text(of)
                val own = tensors(entry.momentumsLength(), state, entry::momentums, of)
                for ((k, label) in own.keys.withIndex()) {
                    check(label == "momentum$k" && fits(own.getValue(label), owner!!.value)) {
                        "'$label' of '$of' has another shape or type than it"
                    }
                }
                moments[of] = own.values.toList()
                of
            }
        }
        val trained = state.parameters.filterValues { it.trainable }.keys
        check(moments.isEmpty() || moments.keys == trained) { "it lacks optimizer state" }
        val counts = moments.values.map { it.size }.distinct()
        check(counts.size <= 1) { "its optimizer state is uneven" }
        val kind = state.properties.remove(OPTIMIZER_PROPERTY) ?: ""
        check(kind is String) { "its $OPTIMIZER_PROPERTY is no text" }
        return OptimizerState(first.step(), rate, moments, groups, kind as String)
    }

    private fun fits(moment: Tensor, owner: Tensor) =
        moment.type == owner.type && moment.shape.size == owner.shape.size &&
            moment.shape.zip(owner.shape).all { (own, size) -> own == 1L || own == size }

    private fun properties(bag: PropertyBag?, state: State) {
        val add = { name: String, value: Any ->
            check(name.isNotEmpty() && name !in state.properties) {
                "a property name, '$name', is empty or occurs twice"
            }
            state.properties[name] = value
        }
        for (i in 0 until (bag?.intsLength() ?: 0)) {
            bag!!.ints(i).run { add(text(nameAsByteBuffer(), ::name), value()) }
        }
        for (i in 0 until (bag?.floatsLength() ?: 0)) {
            bag!!.floats(i).run { add(text(nameAsByteBuffer(), ::name), value()) }
        }
        for (i in 0 until (bag?.stringsLength() ?: 0)) {
            bag!!.strings(i).run {
                add(text(nameAsByteBuffer(), ::name), text(valueAsByteBuffer(), ::value))
            }
        }
    }

    private companion object {
        val NOTHING: ByteBuffer = ByteBuffer.allocateDirect(0)
    }
}
