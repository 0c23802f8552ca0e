package org.odtpack

import com.google.flatbuffers.FlatBufferBuilder
import java.io.File
import java.io.IOException
import java.io.RandomAccessFile
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.channels.FileChannel
import kotlin.concurrent.thread
import org.odtpack.fbs.Checkpoint
import org.odtpack.fbs.FloatProperty
import org.odtpack.fbs.IntProperty
import org.odtpack.fbs.ModuleState
import org.odtpack.fbs.OptimizerGroup
import org.odtpack.fbs.ParameterOptimizerState
import org.odtpack.fbs.PropertyBag
import org.odtpack.fbs.StringProperty
import org.odtpack.fbs.Tensor as Table

internal const val EXTERNAL_ABOVE = 1800L shl 20 // bytes; a flatbuffer ends below 2 GiB

/**
 * What becomes of the save before: nothing; it is the file that is written over; or it stays, as
 * that file is damaged.
 */
internal enum class Previous { NONE, REPLACED, KEPT }

internal fun previousPath(path: String) = "$path.previous"

/**
 * Write a checkpoint whole or not at all. Above [externalAbove] bytes the tensors go to
 * `<path>.data`, where the current checkpoint has none: killed at any moment, it is whole.
 */
internal fun writeCheckpoint(
    path: String,
    state: State,
    withOptimizer: Boolean,
    externalAbove: Long = EXTERNAL_ABOVE,
    previous: Previous = Previous.NONE,
) {
    val target = File(path)
    val dataFile = File("$path.data")
    val before = File(previousPath(path))
    val optimizer = state.optimizer.takeIf { withOptimizer && !state.nominal }
    val tensors = state.parameters.values.map { it.value } +
        optimizer?.moments?.values?.flatten().orEmpty()
    val total = tensors.sumOf { if (state.nominal) 0L else it.data.capacity().toLong() }
    val occupied = firstExternal(if (previous == Previous.KEPT) before else target)
    val keepAs = before.takeIf { previous == Previous.REPLACED }
    val share = { if (keepAs != null) shareData(dataFile, before, occupied < Long.MAX_VALUE) }
    if (total <= externalAbove) {
        val writer = CheckpointWriter(state, optimizer, null)
        writeAtomically(target, keepAs) {
            it.writeAll(writer.head)
            writer.writePayload(it)
            writer.writeDigests(it)
            share()
        }
        if (occupied < Long.MAX_VALUE) dataFile.delete()
        return
    }
    try {
        if (isLink(dataFile)) throw IOException("it is a link")
        RandomAccessFile(dataFile, "rw").use { data ->
            val start = if (occupied >= total) 0 else data.length()
            val writer = CheckpointWriter(state, optimizer, start)
            data.channel.position(start)
            writer.writePayload(data.channel)
            data.channel.force(true)
            forceFolder(dataFile.absoluteFile.parentFile!!)
            writeAtomically(target, keepAs) {
                it.writeAll(writer.head)
                writer.writeDigests(it)
                share()
            }
            if (start == 0L && previous == Previous.NONE) data.setLength(total)
        }
    } catch (error: IOException) {
        notWritten(dataFile, error)
    }
}

/** Give the data of a checkpoint that becomes the one before the name that it refers to. */
private fun shareData(dataFile: File, before: File, external: Boolean) {
    val kept = File("${before.path}.data")
    if (if (external) kept.exists() && isSame(kept, dataFile) else !kept.exists()) return
    before.delete() // first what refers to the data
    kept.delete()
    if (external) link(dataFile, kept)
}

/** Where the data of the current checkpoint begin; at no place if it has none or is unreadable. */
private fun firstExternal(target: File): Long = try {
    CheckpointReader(map(target), target.path, null, false).run {
        read()
        firstExternal
    }
} catch (_: IOException) {
    Long.MAX_VALUE
} catch (_: OdtpackException) {
    Long.MAX_VALUE
}

/**
 * Everything of a file but the tensors' bytes, which follow it or lie in the data file. While they
 * are written, a second thread hashes them.
 */
internal class CheckpointWriter(state: State, optimizer: OptimizerState?, externalFrom: Long?) {
    val head: ByteBuffer

    private val to = FlatBufferBuilder(4096)
    private val nominal = state.nominal
    private val external = externalFrom != null
    private var at = externalFrom ?: -1L
    private val noBytes = Table.createRawDataVector(to, ByteArray(0))
    private val payload = ArrayList<Pair<Int, ByteBuffer>>()
    private val gaps = ArrayList<Int>()
    private val digested = ArrayList<Int>() // tables; the whole's comes last
    private var lastGap = 0
    private val outline = Outline(state.nominal)
    private lateinit var digests: List<String>
    private val hashing = thread(start = false, isDaemon = true) { digests = outline.digests() }

    init {
        val (trainable, frozen) = listOf(true, false).map { wanted ->
            val own = state.parameters.filterValues { it.trainable == wanted }.toSortedMap()
            outline.int(own.size)
            own.map { (name, each) -> add(name, each.value) }.toIntArray()
        }
        val module = ModuleState.createModuleState(
            to, ModuleState.createRequiresGradParamsVector(to, trainable),
            ModuleState.createFrozenParamsVector(to, frozen), nominal, external,
        )
        outline.int(optimizer?.groups.orEmpty().size)
        val groups = optimizer?.groups.orEmpty().mapIndexed { i, names ->
            group("group$i", names, optimizer!!)
        }
        val all = Checkpoint.createOptimizerGroupsVector(to, groups.toIntArray())
        val properties = state.properties.toSortedMap()
        optimizer?.kind?.let { if (it.isNotEmpty()) properties[OPTIMIZER_PROPERTY] = it }
        outline.properties(properties)
        val bag = if (properties.isEmpty()) 0 else bag(properties)
        val root = Checkpoint.createCheckpoint(to, 2, module, all, bag, noBytes)
        Checkpoint.finishCheckpointBuffer(to, root)
        head = ByteBuffer.wrap(to.sizedByteArray()).order(ByteOrder.LITTLE_ENDIAN)
        digested.add(root)
        placeWhatFollows()
        hashing.start()
    }

    /** Write the tensors' bytes: each with its length in front, or one after the other. */
    fun writePayload(file: FileChannel) {
        for ((i, each) in payload.withIndex()) {
            val bytes = each.second.duplicate()
            if (!external) {
                val front = ByteBuffer.allocate(gaps[i] + 4).order(ByteOrder.LITTLE_ENDIAN)
                front.putInt(gaps[i], bytes.remaining())
                file.writeAll(front)
            }
            file.writeAll(bytes)
        }
    }

    /** Write the digests, at the end of the file. */
    fun writeDigests(file: FileChannel) {
        val each = 4 + DIGEST_TEXT_BYTES + 1
        val bytes = ByteBuffer.allocate(lastGap + digested.size * each)
            .order(ByteOrder.LITTLE_ENDIAN)
        bytes.position(lastGap)
        hashing.join()
        for (text in digests) {
            bytes.putInt(DIGEST_TEXT_BYTES)
            bytes.put(text.toByteArray())
            bytes.put(0)
        }
        bytes.flip()
        file.writeAll(bytes)
    }

    private fun add(name: String, tensor: Tensor): Int {
        val label = to.createString(name)
        val dims = Table.createDimsVector(to, if (nominal) LongArray(0) else tensor.shape)
        val bytes = tensor.bytes()
        val kept = !nominal && bytes.hasRemaining()
        val outside = kept && external
        // raw_data stays absent with external data: the reference looks no further if it is there.
        val table = Table.createTensor(
            to, label, if (nominal) 0 else noBytes, dims, tensor.type.code,
            if (outside) 0 else noBytes, 0, if (outside) at else -1,
        )
        outline.tensor(name, tensor)
        if (!nominal) digested.add(table)
        if (outside) at += bytes.remaining()
        if (kept) payload.add(Pair(table, bytes))
        return table
    }

    private fun group(label: String, names: List<String>, optimizer: OptimizerState): Int {
        val kept = names.filter { it in optimizer.moments }
        outline.text(label)
        outline.long(optimizer.step)
        outline.float(optimizer.rate)
        outline.int(kept.size)
        val entries = kept.map { name ->
            outline.text(name)
            outline.int(optimizer.moments.getValue(name).size)
            val own = optimizer.moments.getValue(name)
                .mapIndexed { i, each -> add("momentum$i", each) }
            val moments = ParameterOptimizerState.createMomentumsVector(to, own.toIntArray())
            val of = to.createString(name)
            ParameterOptimizerState.createParameterOptimizerState(to, of, moments)
        }
        val states = OptimizerGroup.createOptimizerStatesVector(to, entries.toIntArray())
        val name = to.createString(label)
        return OptimizerGroup.createOptimizerGroup(to, name, optimizer.step, optimizer.rate, states)
    }

    private fun bag(properties: Map<String, Any>): Int {
        val ints = ArrayList<Int>()
        val floats = ArrayList<Int>()
        val texts = ArrayList<Int>()
        for ((name, value) in properties) {
            val label = to.createString(name)
            when (value) {
                is Long -> ints.add(IntProperty.createIntProperty(to, label, value))
                is Float -> floats.add(FloatProperty.createFloatProperty(to, label, value))
                else -> {
                    val text = to.createString(value as String)
                    texts.add(StringProperty.createStringProperty(to, label, text))
                }
            }
        }
        return PropertyBag.createPropertyBag(
            to, PropertyBag.createIntsVector(to, ints.toIntArray()),
            PropertyBag.createFloatsVector(to, floats.toIntArray()),
            PropertyBag.createStringsVector(to, texts.toIntArray()),
        )
    }

    /**
     * Payload follows the head, each tensor at a multiple of 16, then the digests: offsets point
     * forward.
     */
    private fun placeWhatFollows() {
        var end = head.limit()
        val refer = { offset: Int, field: Int, position: Int ->
            val table = head.limit() - offset
            val vtable = table - head.getInt(table)
            val slot = table + head.getShort(vtable + field)
            head.putInt(slot, position - slot)
        }
        for ((offset, bytes) in if (external) emptyList() else payload) {
            val position = (end + 4 + 15) / 16 * 16
            gaps.add(position - 4 - end)
            refer(offset, RAW_DATA, position - 4)
            end = position + bytes.remaining()
        }
        lastGap = (4 - end % 4) % 4
        end += lastGap
        for ((i, table) in digested.withIndex()) {
            refer(table, if (i == digested.lastIndex) DIGEST else DOC_STRING, end)
            end += 4 + DIGEST_TEXT_BYTES + 1
        }
    }

    private companion object {
        // Where the vtables of a Tensor and a Checkpoint have the places of these fields.
        const val DOC_STRING = 6
        const val RAW_DATA = 12
        const val DIGEST = 12
    }
}
