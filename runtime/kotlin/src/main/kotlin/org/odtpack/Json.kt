package org.odtpack

import java.math.BigDecimal
import java.math.MathContext

/** A value of a JSON document. What is not as it should be is an error, `manifest-invalid`. */
internal class Json(val value: Any?, private val at: String = "") {
    val absent get() = value == null

    /** Itself; null where it is null or missing. */
    val given get() = takeUnless { absent }

    /** Whether an object has a key, if only with null. */
    operator fun contains(key: String) = entries().containsKey(key)

    operator fun get(key: String) = Json(entries()[key], if (at.isEmpty()) key else "$at.$key")

    fun fields(): Map<String, Json> =
        entries().entries.associate { (key, each) -> key as String to Json(each, "$at.$key") }

    fun list(otherwise: List<Json>? = null): List<Json> =
        if (absent && otherwise != null) otherwise
        else (value as? List<*> ?: wrong("a list")).mapIndexed { i, each -> Json(each, "$at[$i]") }

    fun texts(): List<String> = list().map { it.text() }

    fun wholes(): LongArray = list().map { it.whole() }.toLongArray()

    fun text(otherwise: String? = null) = valueAs("text", otherwise)

    fun number(otherwise: Double? = null) = valueAs("a number", otherwise)

    fun flag(otherwise: Boolean) = valueAs("true or false", otherwise)

    fun whole(otherwise: Long? = null): Long {
        val found = number(otherwise?.toDouble())
        return if (found % 1 == 0.0 && Math.abs(found) <= LARGEST_WHOLE) found.toLong()
        else wrong("a whole number within 2^53")
    }

    /** A whole number within bounds. */
    fun within(bounds: LongRange): Long =
        whole().also { if (it !in bounds) wrong("between ${bounds.first} and ${bounds.last}") }

    /** One of some words. */
    fun oneOf(words: Collection<String>): String = text().also { if (it !in words) wrong("known") }

    /** Text with something in it. */
    fun name(): String = text().also { if (it.isEmpty()) wrong("a name") }

    private fun entries() = value as? Map<*, *> ?: wrong("an object")

    private inline fun <reified T> valueAs(wanted: String, otherwise: T?): T =
        if (absent && otherwise != null) otherwise else value as? T ?: wrong(wanted)

    private fun wrong(wanted: String): Nothing = invalid("'$at' is missing or not $wanted")

    companion object {
        val NOTHING = Json(emptyMap<String, Any>())
        private const val LARGEST_WHOLE = 9007199254740991.0 // every one up to it is a double
        private const val MOST_CHARACTERS = 300

        fun invalid(problem: String): Nothing = fail(
            "manifest-invalid", "The manifest is not valid: ${problem.take(MOST_CHARACTERS)}.", // names may be long
            "build the package again with odtpack",
        )

        fun read(bytes: ByteArray): Json {
            val text = String(bytes, Charsets.UTF_8)
            if (!text.toByteArray().contentEquals(bytes)) invalid("it is not UTF-8")
            return Json(JsonReader(text).document())
        }
    }
}

/** Strict: RFC 8259, no key twice, numbers that a double holds, at most 64 levels and 200,000 values. */
private class JsonReader(private val text: String) {
    private var at = 0
    private var values = 0

    fun document(): Any? {
        val value = value(0)
        skipSpace()
        require(at == text.length)
        return value
    }

    private fun require(good: Boolean) {
        if (!good) Json.invalid("it is not JSON at character $at")
    }

    private fun skipSpace() {
        while (at < text.length && text[at] in " \t\r\n") at++
    }

    private fun take(word: String): Boolean {
        skipSpace()
        return skip(word)
    }

    private fun skip(word: String) = text.startsWith(word, at).also { if (it) at += word.length }

    private fun value(depth: Int): Any? {
        if (++values > MOST_VALUES) Json.invalid("it holds more than $MOST_VALUES values")
        return when {
            take("null") -> null
            take("true") -> true
            take("false") -> false
            take("\"") -> string()
            take("[") -> ArrayList<Any?>().also { all(depth, "]") { it.add(value(depth + 1)) } }
            take("{") -> entries(depth)
            else -> number()
        }
    }

    /** Read what a list or an object holds, up to its end. */
    private fun all(depth: Int, end: String, one: () -> Unit) {
        require(depth < MOST_LEVELS)
        if (take(end)) return
        do one() while (take(","))
        require(take(end))
    }

    private fun entries(depth: Int) = LinkedHashMap<String, Any?>().also { entries ->
        all(depth, "}") {
            require(take("\""))
            val key = string()
            require(take(":"))
            if (key in entries) Json.invalid("'$key' occurs twice")
            entries[key] = value(depth + 1)
        }
    }

    private fun string(): String {
        val result = StringBuilder()
        while (!skip("\"")) {
            require(at < text.length && text[at] >= ' ')
            when {
                text[at] != '\\' -> result.append(text[at++])
                skip("\\u") -> {
                    val digits = text.substring(at, minOf(at + 4, text.length))
                    require(digits.length == 4 && digits.all { it in "0123456789abcdefABCDEF" })
                    result.append(digits.toInt(16).toChar())
                    at += 4
                }
                else -> {
                    val escape = text.getOrNull(at + 1)?.let("\"\\/bfnrt"::indexOf) ?: -1
                    require(escape >= 0)
                    result.append("\"\\/\b\u000C\n\r\t"[escape])
                    at += 2
                }
            }
        }
        require(isUnicode(result.toString()))
        return result.toString()
    }

    private fun number(): Double {
        val digits = NUMBER.matchAt(text, at)?.value.orEmpty()
        require(digits.isNotEmpty())
        val number = digits.toDouble()
        require(!number.isInfinite())
        at += digits.length
        return number
    }

    private companion object {
        const val MOST_LEVELS = 64
        const val MOST_VALUES = 200_000
        val NUMBER = Regex("-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?")
    }
}

/** Whether a text has no halves of characters. */
internal fun isUnicode(text: String) = String(text.toByteArray()) == text

/** The shortest text that reads back as the same number, as Python writes it. */
internal fun repr(number: Double): String {
    if (number == 0.0) return "0.0"
    val digits = (1..17).map { BigDecimal(number).round(MathContext(it)) }
        .first { it.toDouble() == number }.stripTrailingZeros()
    val exponent = digits.precision() - digits.scale() - 1
    if (exponent in -4..15) return digits.toPlainString().let { if ('.' in it) it else "$it.0" }
    val mantissa = digits.movePointLeft(exponent).toPlainString()
    val size = Math.abs(exponent).toString().padStart(2, '0')
    return "${mantissa}e${if (exponent < 0) '-' else '+'}$size"
}
