package org.odtpack

import com.google.flatbuffers.FlatBufferBuilder
import java.nio.*
import java.nio.charset.CharacterCodingException

private const val MOST_TABLES = 1_000_000 // as the verifiers of flatbuffers have it
private const val MOST_FIELDS = 32
internal const val MOST_AXES = 32

/**
 * Reads a flatbuffer that nobody verified, as Python does: each offset and length is checked before
 * it is used, no table is read by two references, and texts together are no longer than the file.
 * What flatc generates for Java trusts all of these.
 */
internal class FlatBuffer(bytes: ByteBuffer, private val where: String, private val what: String = "checkpoint") {
    private val bytes = bytes.slice().order(ByteOrder.LITTLE_ENDIAN)
    val size = bytes.remaining().toLong()
    private val seen = HashSet<Int>()
    private var textLeft = size
    private var tablesLeft = size

    fun corrupt(reason: String): Nothing = fail("$what-corrupt", "$where is not a readable $what: $reason.",
        "copy or download the file again, or fall back to an earlier one", where)

    inline fun check(good: Boolean, reason: () -> String) {
        if (!good) corrupt(reason())
    }

    private fun place(position: Long, length: Long): Int {
        check(position >= 0 && length >= 0 && position + length <= size) { "its offsets lead out of the file" }
        return position.toInt()
    }

    private fun short(position: Long) = bytes.getShort(place(position, 2)).toInt() and 0xFFFF
    private fun word(position: Long) = bytes.getInt(place(position, 4)).toLong() and 0xFFFFFFFFL
    private fun follow(slot: Long) = Table(slot + word(slot))

    fun root(identifier: String): Table {
        val good = size >= 8 && identifier.indices.all { bytes.get(4 + it) == identifier[it].code.toByte() }
        check(good) { "it does not carry the identifier $identifier" }
        return follow(0)
    }

    /** How many texts of that number of bytes and pattern stand in the file. */
    fun count(length: Int, pattern: Regex): Int = (0..size.toInt() - length - 5).count { at ->
        bytes.getInt(at) == length && bytes.get(at + 4 + length) == 0.toByte() &&
            pattern.matches(Charsets.ISO_8859_1.decode(bytes.part(at + 4, length)))
    }

    /** A table; its fields go by their numbers in the schema. */
    inner class Table(private val position: Long) {
        private val vtable: Long
        private val length: Int
        private val fields: Int

        init {
            vtable = position - bytes.getInt(place(position, 4))
            val bytesOfVtable = short(vtable)
            length = short(vtable + 2)
            check(bytesOfVtable >= 4 && bytesOfVtable % 2 == 0 && length >= 4) {
                "the table at $position has a malformed vtable"
            }
            place(position, length.toLong())
            place(vtable, bytesOfVtable.toLong())
            fields = minOf(bytesOfVtable / 2 - 2, MOST_FIELDS)
            check(seen.add(position.toInt())) { "two references lead to one table" }
            tablesLeft -= length
            check(tablesLeft >= 0) { "its tables overlap" }
            check(seen.size <= MOST_TABLES) { "it holds more than $MOST_TABLES tables" }
        }

        /** Read a field of [width] bytes; null if there is none. */
        private inline fun <T> field(number: Int, width: Int, read: (Int) -> T): T? {
            val offset = if (number < fields) short(vtable + 4 + 2L * number) else 0
            if (offset == 0) return null
            check(offset >= 4 && offset + width <= length) { "a field of the table at $position lies outside of it" }
            return read((position + offset).toInt())
        }

        fun int(number: Int) = field(number, 4) { bytes.getInt(it) } ?: 0

        fun long(number: Int, default: Long = 0) = field(number, 8) { bytes.getLong(it) } ?: default

        fun float(number: Int) = field(number, 4) { bytes.getFloat(it) } ?: 0f

        fun flag(number: Int) = field(number, 1) { bytes.get(it) != 0.toByte() } ?: false

        fun table(number: Int): Table? = field(number, 4) { follow(it.toLong()) }

        /** Read a vector with elements of [width] bytes: where they are, and how many. */
        private inline fun <T> vector(number: Int, width: Int, read: (Int, Int) -> T): T? = field(number, 4) {
            val start = it + word(it.toLong())
            val count = word(start)
            read(place(start + 4, count * width), count.toInt())
        }

        /** Tables of a vector, each of which is read when it is taken. */
        fun tables(number: Int): Sequence<Table> = vector(number, 4) { start, count ->
            (0 until count).asSequence().map { follow(start + 4L * it) }
        }.orEmpty()

        /** The sizes of a shape. */
        fun sizes(number: Int): LongArray = vector(number, 8) { start, count ->
            check(count in 0..MOST_AXES) { "a shape has $count axes" } // before there is memory for them
            LongArray(count) { bytes.getLong(start + 8 * it) }
        } ?: LongArray(0)

        /** Bytes; null if there are none. */
        fun content(number: Int): ByteBuffer? = vector(number, 1, bytes::part)

        /** A text; empty if there is none. */
        fun text(number: Int): String = vector(number, 1) { start, count ->
            textLeft -= count
            check(textLeft >= 0) { "its strings overlap" } // one may be referred to many times
            check(bytes.get(place(start.toLong() + count, 1)) == 0.toByte()) { "a text has no end" }
            try {
                Charsets.UTF_8.newDecoder().decode(bytes.part(start, count)).toString()
            } catch (_: CharacterCodingException) {
                corrupt("the text at $start is not UTF-8")
            }
        }.orEmpty()

        operator fun contains(number: Int) = field(number, 4) { } != null
    }
}

/** Writes a flatbuffer; what it makes of a text, a vector or a table is a field of another table. */
internal class FlatBufferWriter(size: Int = 4096) {
    private val to = FlatBufferBuilder(size).forceDefaults(true)

    /** Where something stands, from the end of the buffer. */
    class Ref(val offset: Int)

    fun text(text: String) = Ref(to.createString(text))

    fun tables(all: List<Ref>) = Ref(to.createVectorOfTables(IntArray(all.size) { all[it].offset }))

    fun longs(all: LongArray): Ref {
        to.createUnintializedVector(8, all.size, 8).asLongBuffer().put(all)
        return Ref(to.endVector())
    }

    fun content(all: ByteBuffer): Ref {
        to.createUnintializedVector(1, all.remaining(), 8).put(all)
        return Ref(to.endVector())
    }

    /** A table of these fields, in the order of the schema; null for one that it has not. */
    fun table(vararg fields: Any?): Ref {
        to.startTable(fields.size)
        for ((i, field) in fields.withIndex()) {
            when (field) {
                is Ref -> to.addOffset(i, field.offset, 0)
                is Int -> to.addInt(i, field, 0)
                is Long -> to.addLong(i, field, 0)
                is Float -> to.addFloat(i, field, 0.0)
                is Boolean -> to.addBoolean(i, field, false)
                else -> require(field == null)
            }
        }
        return Ref(to.endTable())
    }

    fun finish(root: Ref, identifier: String): ByteBuffer {
        to.finish(root.offset, identifier)
        return to.dataBuffer().slice().order(ByteOrder.LITTLE_ENDIAN)
    }
}
