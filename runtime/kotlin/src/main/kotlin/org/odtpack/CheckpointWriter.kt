package org.odtpack

import java.io.*
import java.nio.ByteBuffer
import java.nio.channels.FileChannel
import kotlin.concurrent.thread

internal const val EXTERNAL_ABOVE = 1800L shl 20 // bytes; a flatbuffer ends below 2 GiB

internal fun previousPath(path: String) = "$path.previous"

/**
 * One save of a checkpoint, whole or not at all: the file, its data file, and the names of the save
 * before.
 *
 * @param keepPrevious Whether the file that is written over becomes the save before, if it reads as
 *   whole. Any other stays what it is.
 */
internal class Save(
    path: String,
    private val state: State,
    withOptimizer: Boolean,
    private val keepPrevious: Boolean = false,
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
        rotates = keepPrevious && isWhole()
        kept = if (!rotates && isSame(beforeData, dataFile)) regionOf(before) else NOTHING
    }

    /**
     * Write it. Above [externalAbove] bytes the tensors go to `<path>.data`, where the current
     * checkpoint has none: killed at any moment, it is whole.
     */
    fun write(externalAbove: Long = EXTERNAL_ABOVE) {
        val tensors = state.parameters.values.map { it.value } + optimizer?.moments?.values?.flatten().orEmpty()
        val total = if (state.nominal) 0L else tensors.sumOf { it.data.capacity().toLong() }
        if (target.path.isNotEmpty()) refuseLink(target)
        // An empty path is that of the working folder, and exists() says that there is nothing.
        val isFile = target.path.isNotEmpty() && !target.isDirectory && (target.isFile || !target.exists())
        if (total > externalAbove && isFile) return outside(total)
        look()
        replace(CheckpointWriter(state, optimizer, null))
        if (!current.isEmpty() || !kept.isEmpty()) removeData()
    }

    /** Remove the data file, once no other process writes to it, if this save is still the last. */
    private fun removeData() = synchronized(DataFiles) {
        ignoring {
            RandomAccessFile(dataFile, "rw").use {
                lock(it.channel)
                if (identity(target) == state.whole) dataFile.delete()
            }
        }
    }

    private fun outside(total: Long) = synchronized(DataFiles) {
        if (isLink(dataFile)) notWritten(dataFile, IOException("it is a link"))
        try {
            while (!attempt(total)) Unit
        } catch (error: IOException) {
            notWritten(dataFile, error)
        }
    }

    /**
     * Write the elements into the data file, and then the file that refers to them. False if another
     * process saved before this one had the lock. What was there is read before: to close a file
     * lifts the locks that this process has on it.
     */
    private fun attempt(total: Long): Boolean {
        val files = listOf(target, before, dataFile)
        val found = files.map(::identity)
        look()
        requireLinks()
        val fresh = dataFile.createNewFile()
        undoing({ if (fresh) dataFile.delete() }) { RandomAccessFile(dataFile, "rw") }.use { data ->
            if (fresh) takeMode(dataFile, target, isOpenedAgain = true)
            val expected = if (fresh) found.dropLast(1) + identity(dataFile) else found
            lock(data.channel)
            if (files.map(::identity) != expected) return false
            val size = data.length()
            val start = freeRegion(total)
            try {
                val writer = CheckpointWriter(state, optimizer, start)
                data.channel.position(start)
                writer.writePayload(data.channel)
                data.channel.force(true)
                forceFolder(dataFile.absoluteFile.parentFile!!)
                replace(writer)
            } catch (error: Throwable) {
                if (error is NotDurable) throw error // it is in place
                if (fresh) dataFile.delete() else shorten(data, size)
                throw error
            }
            val stays = if (rotates) current else kept
            shorten(data, maxOf(start + total, if (stays.isEmpty()) 0 else stays.last + 1))
            return true
        }
    }

    /** Cut off the end of the file, which no checkpoint refers to. */
    private fun shorten(data: RandomAccessFile, size: Long) =
        ignoring { if (data.length() > size) data.setLength(size) }

    /** Do what does no harm if it fails. */
    private fun ignoring(body: () -> Unit) = try {
        body()
    } catch (_: IOException) {
    }

    /** Write the file, which takes its name. */
    private fun replace(writer: CheckpointWriter) {
        try {
            state.whole = writeAtomically(target, before.takeIf { rotates }) {
                it.writeAll(writer.head)
                if (!writer.external) writer.writePayload(it)
                writer.writeDigests(it)
                // The data of the file that becomes the save before take the name that it refers to.
                val shares = rotates && !current.isEmpty() && !isSame(beforeData, dataFile)
                if (shares) addName(dataFile, beforeData, temporaryFor(target))
            }
        } catch (error: NotDurable) {
            throw error
        } catch (error: OdtpackException) {
            if (!hadBeforeData && !isSame(before, target)) beforeData.delete()
            throw error
        }
        if (rotates && current.isEmpty()) beforeData.delete()
    }

    /** Whether the file that is replaced may become the save before. */
    private fun isWhole(): Boolean {
        val found = identity(target)
        if (!target.isFile || !current.isEmpty() && dataFile.length() <= current.last) return false
        return found != null && found == state.whole || try {
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
            fail("file-not-written", "${target.path} could not be written: the save before it cannot be kept, " +
                "because its data are a file of their own and there are no hard links here.",
                "save without keeping the one before, or to a file system that has them")
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
    else describe(file).run {
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

    private val to = FlatBufferWriter()
    private val nominal = state.nominal
    val external = externalFrom != null
    private var at = externalFrom ?: -1L
    private val noBytes = to.content(ByteBuffer.allocate(0)) // in the place of what follows the head
    private val payload = ArrayList<Pair<Int, ByteBuffer>>() // tables, and the bytes of their tensors
    private val gaps = ArrayList<Int>()
    private val digested = ArrayList<Int>() // tables; the whole's comes last
    private var lastGap = 0
    private lateinit var digests: List<String>
    private val hashing: Thread

    init {
        val parameters = state.parameters.toSortedMap()
        val properties = state.properties.toSortedMap()
        optimizer?.kind?.let { if (it.isNotEmpty()) properties[OPTIMIZER_PROPERTY] = it }
        val outline = Outline(nominal, parameters, optimizer, properties)
        val (trainable, frozen) = listOf(true, false).map { wanted ->
            to.tables(parameters.filterValues { it.trainable == wanted }.map { (name, each) -> add(name, each.value) })
        }
        val module = to.table(trainable, frozen, nominal, external)
        val groups = to.tables(optimizer?.groups.orEmpty().mapIndexed { i, names -> group(i, names, optimizer!!) })
        val bag = if (properties.isEmpty()) null else bag(properties)
        val root = to.table(2, module, groups, bag, noBytes)
        head = to.finish(root, "ODTC")
        digested.add(root.offset)
        placeWhatFollows()
        hashing = thread(isDaemon = true) { digests = outline.digests() }
    }

    /** Write the tensors' bytes: each with its length in front, or one after the other. */
    fun writePayload(file: FileChannel) {
        for ((i, each) in payload.withIndex()) {
            val bytes = each.second
            if (!external) file.writeAll(littleEndian(gaps[i] + 4).putInt(gaps[i], bytes.remaining()))
            file.writeAll(bytes)
        }
    }

    /** Write the digests, at the end of the file. */
    fun writeDigests(file: FileChannel) {
        val bytes = littleEndian(lastGap + digested.size * DIGEST_SIZE)
        bytes.position(lastGap)
        hashing.join()
        for (text in digests) bytes.putInt(DIGEST_TEXT_BYTES).put(text.toByteArray()).put(0)
        bytes.rewind()
        file.writeAll(bytes)
    }

    private fun add(name: String, tensor: Tensor): FlatBufferWriter.Ref {
        val bytes = tensor.bytes()
        val kept = !nominal && bytes.hasRemaining()
        val outside = kept && external
        // raw_data stays absent with external data: the reference looks no further if it is there.
        val table = to.table(
            to.text(name), noBytes.takeUnless { nominal }, to.longs(if (nominal) LongArray(0) else tensor.shape),
            tensor.type.code, noBytes.takeUnless { outside }, null, if (outside) at else -1L,
        )
        if (!nominal) digested.add(table.offset)
        if (outside) at += bytes.remaining()
        if (kept) payload.add(Pair(table.offset, bytes))
        return table
    }

    private fun group(index: Int, names: List<String>, optimizer: OptimizerState): FlatBufferWriter.Ref {
        val entries = names.filter(optimizer.moments::containsKey).map { name ->
            val moments = optimizer.moments.getValue(name).mapIndexed { i, each -> add("momentum$i", each) }
            to.table(to.text(name), to.tables(moments))
        }
        return to.table(to.text("group$index"), optimizer.step, optimizer.rate, to.tables(entries))
    }

    private fun bag(properties: Map<String, Any>): FlatBufferWriter.Ref {
        val kinds = PROPERTY_TYPES.map { type ->
            to.tables(properties.filterValues(type::isInstance).map { (name, value) ->
                to.table(to.text(name), if (value is String) to.text(value) else value)
            })
        }
        return to.table(*kinds.toTypedArray())
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
            val slot = table + head.getShort(vtable + 4 + 2 * field)
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
            end += DIGEST_SIZE
        }
    }

    private companion object {
        const val DIGEST_SIZE = 4 + DIGEST_TEXT_BYTES + 1

        // The numbers of these fields of a tensor, and of the root.
        const val DOC_STRING = 1
        const val RAW_DATA = 4
        const val DIGEST = 4
    }
}
