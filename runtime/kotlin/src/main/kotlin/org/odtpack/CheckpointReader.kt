package org.odtpack

import java.io.*
import java.nio.ByteBuffer

private const val MOST_READINGS = 8

/** Read a checkpoint; again, if it was replaced meanwhile: a file and its data file are two. */
internal fun readCheckpoint(path: String): State {
    repeat(MOST_READINGS - 1) {
        val seen = identity(File(path))
        try {
            return readOnce(path)
        } catch (error: OdtpackException) {
            if (identity(File(path)) == seen) throw error
        }
    }
    return readOnce(path)
}

private fun readOnce(path: String): State = try {
    uninterrupted { CheckpointReader(map(File(path)), path, File("$path.data")).read() }
} catch (error: IOException) {
    val missing = error is FileNotFoundException && !File(path).exists()
    fail(if (missing) "checkpoint-not-found" else "checkpoint-unreadable",
        "The checkpoint cannot be read: ${error.message}.", where = path)
}

/** What the save before can help against. */
private val HARMED = setOf(
    "checkpoint-corrupt", "checkpoint-not-found", "checkpoint-unreadable", "checkpoint-version", "checkpoint-dtype",
)

/** Read a checkpoint, or the one before it if it is damaged or missing. */
internal fun readLastGood(path: String): State {
    try {
        val found = identity(File(path))
        val state = readCheckpoint(path)
        if (identity(File(path)) == found) state.whole = found
        return state
    } catch (error: OdtpackException) {
        val before = previousPath(path)
        if (error.errorCode !in HARMED || !File(before).isFile) throw error
        val state = runCatching { readCheckpoint(before) }.getOrElse { throw error }
        val step = state.optimizer?.step ?: 0
        // That of the damaged file, if it can still be read.
        val last = runCatching { describe(File(path)).read().optimizer?.step }.getOrNull() ?: 0
        val lost = if (last > step) "${last - step} optimizer steps made since are lost"
        else "what was trained since is lost"
        state.recovered = "${error.what} The save before it was loaded, $before, of optimizer step $step: $lost."
        return state
    }
}

/** A reader of what a file holds but the elements of its tensors. */
internal fun describe(file: File) = CheckpointReader(map(file), file.path, null, false)

/** Reads one file; without [values], tensors are described and have no memory. */
internal class CheckpointReader(
    bytes: ByteBuffer,
    private val where: String,
    private val dataFile: File? = null,
    private val values: Boolean = true,
) {
    /** What it uses of its data file, after [read]: from the lowest offset to the end. */
    var external = LongRange.EMPTY
        private set
    private val file = FlatBuffer(bytes, where)
    private var data: RandomAccessFile? = null
    private var inlineLeft = file.size
    private var externalLeft = if (values) 0L else Long.MAX_VALUE
    private val said = ArrayList<Pair<String, String>>() // tensors, and the digests of the file

    fun read(): State = try {
        readState()
    } finally {
        data?.let { synchronized(DataFiles) { it.close() } }
    }

    private fun readState(): State {
        val root = file.root("ODTC")
        if (root.int(0) != 2) fail("checkpoint-version", "It is not of version 2.", where = where)
        val module = root.table(1) ?: file.corrupt("it has no module state")
        val state = State(module.flag(2))
        if (module.flag(3) && values) {
            val found = dataFile?.takeIf { it.isFile && !isLink(it) } ?: file.corrupt("it has no data file")
            data = RandomAccessFile(found, "r")
            externalLeft = found.length()
        }
        for ((number, trainable) in listOf(true, false).withIndex()) {
            for ((name, value) in tensors(module.tables(number), state.nominal)) {
                val twice = state.parameters.put(name, Parameter(value, trainable)) != null
                file.check(!twice) { "parameter '$name' is both trainable and frozen" }
            }
        }
        state.optimizer = optimizer(root.tables(2), state)
        root.table(3)?.let { properties(it, state.properties) }
        if (values) state.checked = checkDigest(root.text(DIGEST_FIELD), state)
        val kind = state.properties.remove(OPTIMIZER_PROPERTY) ?: ""
        state.optimizer?.kind = kind as? String ?: file.corrupt("its $OPTIMIZER_PROPERTY is not text")
        return state
    }

    /**
     * Compare with the digests that the file carries. Without any it must be as the reference writes
     * it, and is not checked: a file of ours that lost them is damaged. Its digests
     * are in it then, where nothing refers to them, because a few bytes may hide all tables.
     */
    private fun checkDigest(whole: String, state: State): Boolean {
        val marked = said.any { (_, digest) -> digest.startsWith(DIGEST_PREFIX) }
        if (whole.isEmpty() && !marked) {
            val known = state.properties.values.count { it is String && DIGEST_TEXT.matches(it) }
            val ours = file.count(DIGEST_TEXT_BYTES, DIGEST_TEXT) > known
            file.check(!ours) { "it was written by odtpack, and lacks the digest that it had" }
            return false
        }
        val digests = Outline(state.nominal, state.parameters, state.optimizer, state.properties).digests()
        if (whole == digests.last()) return true
        val odd = said.filterIndexed { i, (_, digest) -> marked && digest != digests[i] }
        val what = odd.joinToString(limit = MOST_NAMED) { (name, _) -> "'$name'" }
            .ifEmpty { "its names, shapes, optimizer state or properties" }
        file.corrupt("what is stored is not what was saved: $what")
    }

    private fun tensors(tables: Sequence<FlatBuffer.Table>, nominal: Boolean, of: String = ""): Map<String, Tensor> {
        val tensors = LinkedHashMap<String, Tensor>()
        for (table in tables) {
            val name = table.text(0)
            file.check(name.isNotEmpty() && name !in tensors) {
                "a parameter name, '$name', is empty or occurs twice"
            }
            tensors[name] = tensor(name, table, nominal)
            if (values && !nominal) said.add(Pair(if (of.isEmpty()) name else "$name of $of", table.text(1)))
        }
        return tensors
    }

    private fun tensor(name: String, table: FlatBuffer.Table, nominal: Boolean): Tensor {
        val code = table.int(3)
        val type = Type.of(code) ?: fail("checkpoint-dtype",
            "'$name' has elements of ONNX type $code, which are not supported.", where = where)
        val shape = table.sizes(2)
        val most = shape.fold(1.0) { most, each -> most * maxOf(each, 1) }
        file.check(shape.all { it >= 0 } && most <= 1L shl 48) { "'$name' has an impossible shape" }
        val raw = table.content(4)
        val offset = table.long(6, -1)
        file.check(5 !in table) { "'$name' holds strings" }
        val stored = (raw?.remaining() ?: 0).toLong()
        if (nominal) {
            file.check(shape.isEmpty() && stored == 0L && offset == -1L) { "it is nominal, with values" }
            return Tensor(type, longArrayOf(0), NO_BYTES)
        }
        val length = shape.fold(type.size.toLong(), Long::times)
        val inside = offset == -1L
        file.check(stored == if (inside) length else 0L) { "the shape of '$name' is not its size" }
        if (inside) inlineLeft -= length else externalLeft -= length
        file.check(inlineLeft >= 0 && externalLeft >= 0) { "its tensors overlap" }
        if (!inside) external = extended(offset, length)
        if (!values || length == 0L && inside) return Tensor(type, shape, NO_BYTES)
        val opened = data
        file.check(inside || opened != null && offset >= 0 && offset <= opened.length() - length) {
            "'$name' lies outside of its data file"
        }
        val tensor = zeros(type, shape)
        val target = tensor.bytes()
        if (inside) target.put(raw!!)
        while (target.hasRemaining()) {
            val got = opened!!.channel.read(target, offset + target.position())
            file.check(got > 0) { "its data file became shorter" }
        }
        file.check(type != Type.BOOL || (0 until length.toInt()).all { tensor.data.get(it) in 0..1 }) {
            "'$name' holds bools that are neither 0 nor 1"
        }
        return tensor
    }

    private fun extended(offset: Long, length: Long): LongRange {
        file.check(offset >= 0 && offset <= Long.MAX_VALUE - length) { "an offset is impossible" }
        val first = if (external.isEmpty()) offset else minOf(external.first, offset)
        return first until maxOf(external.last + 1, offset + length, first + 1)
    }

    private fun optimizer(tables: Sequence<FlatBuffer.Table>, state: State): OptimizerState? {
        var step = 0L
        var rate = 0f
        val moments = LinkedHashMap<String, List<Tensor>>()
        val groups = ArrayList<List<String>>()
        for ((index, group) in tables.withIndex()) {
            val name = group.text(0)
            if (index == 0) {
                step = group.long(1)
                rate = group.float(2)
                file.check(step >= 0 && rate.isFinite()) { "the optimizer stands at step $step with rate $rate" }
            }
            file.check(name == "group$index" && group.long(1) == step && group.float(2) == rate) {
                "its optimizer groups have other names, or stand at different steps or rates"
            }
            groups += group.tables(3).map { entry ->
                val of = entry.text(0)
                val owner = state.parameters[of]
                file.check(owner != null && owner.trainable && of !in moments) {
                    "the optimizer state of '$of' occurs twice or belongs to no parameter"
                }
                val own = tensors(entry.tables(1), state.nominal, of)
                for ((k, label) in own.keys.withIndex()) {
                    file.check(label == "momentum$k" && fits(own.getValue(label), owner!!.value)) {
                        "'$label' of '$of' has another shape or type than it"
                    }
                }
                moments[of] = own.values.toList()
                of
            }.toList()
        }
        if (groups.isEmpty()) return null
        val trained = state.parameters.filterValues { it.trainable }.keys
        file.check(moments.isEmpty() || moments.keys == trained) { "it lacks optimizer state" }
        file.check(moments.values.distinctBy { it.size }.size <= 1) { "its optimizer state is uneven" }
        return OptimizerState(step, rate, moments, groups)
    }

    private fun fits(moment: Tensor, owner: Tensor) =
        moment.type == owner.type && moment.shape.size == owner.shape.size &&
            moment.shape.zip(owner.shape).all { (own, size) -> own == 1L || own == size }

    private fun properties(bag: FlatBuffer.Table, found: MutableMap<String, Any>) {
        for ((number, type) in PROPERTY_TYPES.withIndex()) {
            for (table in bag.tables(number)) {
                val name = table.text(0)
                file.check(name.isNotEmpty() && name !in found) {
                    "a property name, '$name', is empty or occurs twice"
                }
                found[name] = when (type) {
                    Long::class -> table.long(1)
                    Float::class -> table.float(1)
                    else -> table.text(1)
                }
            }
        }
    }

    private companion object {
        val NO_BYTES: ByteBuffer = ByteBuffer.allocateDirect(0)
        const val DIGEST_FIELD = 4 // of the root; the reference's schema ends before
        val DIGEST_TEXT = Regex("$DIGEST_PREFIX[0-9a-f]{64}")
        const val MOST_NAMED = 3
    }
}
