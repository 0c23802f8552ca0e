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

internal fun previousPath(path: String) = "$path.previous"

/**
 * Write a checkpoint whole or not at all. Above [externalAbove] bytes the tensors go to
 * `<path>.data`, where the current checkpoint has none: killed at any moment, it is whole.
 *
 * @param keepPrevious Whether the file that is written over becomes the save before, if it reads as
 *   whole; [known] is the identity of one that does. Any other stays what it is.
 * @return The identity of the new file.
 */
internal fun writeCheckpoint(
    path: String,
    state: State,
    withOptimizer: Boolean,
    externalAbove: Long = EXTERNAL_ABOVE,
    keepPrevious: Boolean = false,
    known: Any? = null,
): Any? = Save(path, state, withOptimizer, keepPrevious, known).write(externalAbove)

/** One save: the file, its data file, and the names of the save before. */
private class Save(
    path: String,
    private val state: State,
    withOptimizer: Boolean,
    private val keepPrevious: Boolean,
    private val known: Any?,
) {
    private val target = File(path)
    private val dataFile = File("$path.data")
    private val before = File(previousPath(path))
    private val beforeData = File("${before.path}.data")
    private val optimizer = state.optimizer.takeIf { withOptimizer && !state.nominal }

    private val hadBeforeData = beforeData.exists()

    /** What must stay whole in the data file until the new checkpoint is. */
    private var current = NOTHING
    private var kept = NOTHING
    private var rotates = false

    private fun look() {
        current = regionOf(target)
        rotates = keepPrevious && isWhole(known)
        kept = if (!rotates && isSame(beforeData, dataFile)) regionOf(before) else NOTHING
    }

    fun write(externalAbove: Long): Any? {
        val tensors = state.parameters.values.map { it.value } +
            optimizer?.moments?.values?.flatten().orEmpty()
        val total = tensors.sumOf { if (state.nominal) 0L else it.data.capacity().toLong() }
        if (target.path.isNotEmpty()) refuseLink(target)
        // An empty path is that of the working folder, and exists() says that there is nothing.
        val isFile = target.path.isNotEmpty() && !target.isDirectory && (target.isFile || !target.exists())
        if (total > externalAbove && isFile) return outside(total)
        look()
        val writer = CheckpointWriter(state, optimizer, null)
        val written = replace(writer) { writer.writePayload(it) }
        if (!current.isEmpty() || !kept.isEmpty()) removeData(written)
        return written
    }

    /** Remove the data file, once no other process writes to it, if this save is still the last. */
    private fun removeData(written: Any?) = synchronized(DataFiles) {
        try {
            RandomAccessFile(dataFile, "rw").use {
                lock(it.channel)
                if (identity(target) == written) dataFile.delete()
            }
        } catch (_: IOException) { // nothing refers to it
        }
    }

    private fun outside(total: Long): Any? = synchronized(DataFiles) {
        if (isLink(dataFile)) notWritten(dataFile, IOException("it is a link"))
        try {
            while (true) attempt(total)?.let { return it[0] }
        } catch (error: IOException) {
            notWritten(dataFile, error)
        }
    }

    /**
     * Write the elements into the data file, and then the file that refers to them. Null if another
     * process saved before this one had the lock. What was there is read before: to close a file
     * lifts the locks that this process has on it.
     */
    private fun attempt(total: Long): List<Any?>? {
        val files = listOf(target, before, dataFile)
        val found = files.map(::identity)
        look()
        requireLinks()
        val fresh = dataFile.createNewFile()
        val data = try {
            RandomAccessFile(dataFile, "rw")
        } catch (error: IOException) {
            if (fresh) dataFile.delete()
            throw error
        }
        data.use {
            if (fresh) takeMode(dataFile, target, isOpenedAgain = true)
            val expected = if (fresh) found.dropLast(1) + identity(dataFile) else found
            lock(data.channel)
            if (files.map(::identity) != expected) return null
            val size = data.length()
            var inPlace = false
            try {
                val start = freeRegion(total)
                val writer = CheckpointWriter(state, optimizer, start)
                data.channel.position(start)
                writer.writePayload(data.channel)
                data.channel.force(true)
                forceFolder(dataFile.absoluteFile.parentFile!!)
                val written = replace(writer) { }
                inPlace = true
                val stays = if (rotates) current else kept
                shorten(data, maxOf(start + total, if (stays.isEmpty()) 0 else stays.last + 1))
                return listOf(written)
            } catch (error: NotDurable) {
                inPlace = true
                throw error
            } finally {
                if (!inPlace && fresh) dataFile.delete() else if (!inPlace) shorten(data, size)
            }
        }
    }

    /** Cut off the end of the file, which no checkpoint refers to. */
    private fun shorten(data: RandomAccessFile, size: Long) = try {
        if (data.length() > size) data.setLength(size) else Unit
    } catch (_: IOException) { // it does no harm
    }

    /** Write the file, which takes its name; [payload] are the elements that are inside it. */
    private fun replace(writer: CheckpointWriter, payload: (FileChannel) -> Unit): Any? {
        val written = try {
            writeAtomically(target, before.takeIf { rotates }) {
                it.writeAll(writer.head)
                payload(it)
                writer.writeDigests(it)
                if (rotates && !current.isEmpty()) shareData()
            }
        } catch (error: NotDurable) {
            throw error
        } catch (error: OdtpackException) {
            if (!hadBeforeData && !isSame(before, target)) beforeData.delete()
            throw error
        }
        if (rotates && current.isEmpty()) beforeData.delete()
        return written
    }

    /** Whether the file that is replaced may become the save before. */
    private fun isWhole(known: Any?): Boolean {
        val found = identity(target)
        if (!target.isFile || !current.isEmpty() && dataFile.length() <= current.last) return false
        if (known != null && found == known) return true
        return try {
            readCheckpoint(target.path)
            true
        } catch (_: OdtpackException) {
            false
        }
    }

    /** Refuse, before anything is written, to keep data that can have no second name. */
    private fun requireLinks() {
        if (!rotates || current.isEmpty() || isSame(beforeData, dataFile)) return
        val second = temporaryFor(target)
        try {
            link(dataFile, second)
        } catch (_: NoLinks) {
            fail(
                "file-not-written", "${target.path} could not be written: the save before it " +
                    "cannot be kept, because its data are a file of their own and there are no " +
                    "hard links here.", "",
                "save without keeping the one before, or to a file system that has them",
            )
        } finally {
            second.delete()
        }
    }

    /** Give the data of the file that becomes the save before the name that it refers to. */
    private fun shareData() {
        if (isSame(beforeData, dataFile)) return
        val second = temporaryFor(target)
        try {
            link(dataFile, second)
            rename(second, beforeData)
        } finally {
            second.delete()
        }
    }

    /** The first place in the data file that touches no region in use. */
    private fun freeRegion(total: Long): Long {
        var start = 0L
        for (region in listOf(current, kept).filter { !it.isEmpty() }.sortedBy { it.first }) {
            if (start + total <= region.first) break
            start = maxOf(start, region.last + 1)
        }
        return start
    }
}

private val NOTHING = LongRange.EMPTY

/**
 * What a checkpoint uses of its data file; nothing if it has none, or is damaged. One that cannot be
 * opened may use any of it.
 */
private fun regionOf(file: File): LongRange = try {
    if (!file.isFile || file.length() > Int.MAX_VALUE) NOTHING
    else CheckpointReader(map(file), file.path, null, false).run {
        read()
        external
    }
} catch (error: IOException) {
    notWritten(file, error)
} catch (_: OdtpackException) {
    NOTHING
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
