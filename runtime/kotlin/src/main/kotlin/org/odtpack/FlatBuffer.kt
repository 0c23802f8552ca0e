package org.odtpack

import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.CharBuffer
import java.nio.charset.CharacterCodingException

private const val MOST_TABLES = 1_000_000 // as the verifiers of flatbuffers have it
private const val MOST_FIELDS = 32

/**
 * Reads a flatbuffer that nobody verified, as Python does: each offset and length is checked before
 * it is used, no table is read by two references, and texts together are no longer than the file.
 * What flatc generates for Java trusts all of these.
 */
internal class FlatBuffer(
    bytes: ByteBuffer,
    private val where: String,
    private val what: String = "checkpoint",
) {
    private val bytes = bytes.slice().order(ByteOrder.LITTLE_ENDIAN)
    val size = bytes.remaining().toLong()
    private val seen = HashSet<Int>()
    private var textLeft = size
    private var tablesLeft = size

    fun corrupt(reason: String): Nothing = fail(
        "$what-corrupt", "$where is not a readable $what: $reason.", where,
        "copy or download the file again, or fall back to an earlier one",
    )

    inline fun check(good: Boolean, reason: () -> String) {
        if (!good) corrupt(reason())
    }

    private fun place(position: Long, length: Long): Int {
        check(position >= 0 && length >= 0 && position + length <= size) {
            "its offsets lead out of the file"
        }
        return position.toInt()
    }

    private fun short(position: Long) = bytes.getShort(place(position, 2)).toInt() and 0xFFFF
    private fun word(position: Long) = bytes.getInt(place(position, 4)).toLong() and 0xFFFFFFFFL

    fun root(identifier: String): Table {
        val good = size >= 8 && identifier.indices.all { bytes.get(4 + it) == identifier[it].code.toByte() }
        check(good) { "it does not carry the identifier $identifier" }
        return Table(word(0))
    }

    /** How many texts of that start, number of bytes and pattern stand in the file. */
    fun count(start: String, length: Int, pattern: Regex): Int {
        val whole = ByteBuffer.allocate(4 + start.length).order(ByteOrder.LITTLE_ENDIAN)
        whole.putInt(length).put(start.toByteArray())
        val wanted = whole.array()
        var found = 0
        for (at in 0..size.toInt() - length - 5) {
            if (bytes.get(at) != wanted[0] || wanted.indices.any { bytes.get(at + it) != wanted[it] }) continue
            val text = Vector(at + 4L, length).content()
            val ends = bytes.get(at + 4 + length) == 0.toByte()
            if (ends && pattern.matches(Charsets.ISO_8859_1.decode(text))) found++
        }
        return found
    }

    inner class Vector(val position: Long, val length: Int) {
        fun table(index: Int) = follow(position + 4L * index)

        fun long(index: Int) = bytes.getLong((position + 8L * index).toInt())

        /** Its bytes, if elements are bytes. */
        fun content(): ByteBuffer {
            val view = bytes.duplicate()
            view.limit(position.toInt() + length)
            view.position(position.toInt())
            return view.slice().order(ByteOrder.LITTLE_ENDIAN)
        }
    }

    private fun follow(slot: Long) = Table(slot + word(slot))

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
            fields = bytesOfVtable / 2 - 2
            check(seen.add(position.toInt())) { "two references lead to one table" }
            tablesLeft -= length
            check(tablesLeft >= 0) { "its tables overlap" }
            check(seen.size <= MOST_TABLES) { "it holds more than $MOST_TABLES tables" }
        }

        private fun field(number: Int, width: Int): Long {
            val offset = if (number < minOf(fields, MOST_FIELDS)) short(vtable + 4 + 2L * number) else 0
            if (offset == 0) return -1
            check(offset >= 4 && offset + width <= length) {
                "a field of the table at $position lies outside of it"
            }
            return position + offset
        }

        fun int(number: Int) = field(number, 4).let { if (it < 0) 0 else bytes.getInt(it.toInt()) }

        fun long(number: Int, default: Long = 0) =
            field(number, 8).let { if (it < 0) default else bytes.getLong(it.toInt()) }

        fun float(number: Int) =
            field(number, 4).let { if (it < 0) 0f else bytes.getFloat(it.toInt()) }

        fun flag(number: Int) =
            field(number, 1).let { it >= 0 && bytes.get(it.toInt()) != 0.toByte() }

        fun table(number: Int): Table? = field(number, 4).let { if (it < 0) null else follow(it) }

        /** A vector of elements of [width] bytes; an empty one if there is none. */
        fun vector(number: Int, width: Int): Vector = optional(number, width) ?: Vector(0, 0)

        /** A vector; null if there is none. */
        fun optional(number: Int, width: Int): Vector? {
            val slot = field(number, 4)
            if (slot < 0) return null
            val start = slot + word(slot)
            val count = word(start)
            place(start + 4, count * width)
            return Vector(start + 4, count.toInt())
        }

        /** A text; empty if there is none. */
        fun text(number: Int): String {
            val found = optional(number, 1) ?: return ""
            textLeft -= found.length
            check(textLeft >= 0) { "its strings overlap" } // one may be referred to many times
            val end = place(found.position, found.length + 1L) + found.length
            check(bytes.get(end) == 0.toByte()) { "a text has no end" }
            val characters: CharBuffer = try {
                Charsets.UTF_8.newDecoder().decode(found.content())
            } catch (_: CharacterCodingException) {
                corrupt("the text at ${found.position} is not UTF-8")
            }
            return characters.toString()
        }
    }
}
