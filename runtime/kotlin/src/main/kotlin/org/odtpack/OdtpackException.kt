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
) : OrtException(
        what + (if (where.isEmpty()) "" else "\n  in: $where") +
            (if (hint.isEmpty()) "" else "\n  help: $hint"),
    )

internal fun fail(code: String, what: String, where: String = "", hint: String = ""): Nothing =
    throw OdtpackException(code, what, where, hint)
