package org.odtpack

import ai.onnxruntime.OrtException

/**
 * Bad input or usage, for the person who must correct it.
 *
 * @property errorCode Stable kebab-case identifier, such as `checkpoint-corrupt`: those of Python.
 */
open class OdtpackException(
    val errorCode: String,
    internal val what: String,
    where: String = "",
    hint: String = "",
) : OrtException(what + line("in", where) + line("help", hint))

private fun line(label: String, text: String) = if (text.isEmpty()) "" else "\n  $label: $text"

internal fun fail(code: String, what: String, hint: String = "", where: String = ""): Nothing =
    throw OdtpackException(code, what, where, hint)

/** Do something; what was done for it before is undone where it fails. */
internal inline fun <T> undoing(undo: () -> Unit, body: () -> T): T = try {
    body()
} catch (error: Throwable) {
    undo()
    throw error
}
