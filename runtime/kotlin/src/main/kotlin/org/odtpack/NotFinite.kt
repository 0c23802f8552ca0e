package org.odtpack

/** What follows a loss or a gradient that is not finite, once what the step changed is put back. */
enum class OnNotFinite {
    /** The step is counted in `skippedSteps`, and the training goes on. */
    SKIP,

    /** The step throws `loss-not-finite` or `gradient-not-finite`. */
    STOP,
}

/**
 * A loss or a gradient that was not finite.
 *
 * @property errorCode `loss-not-finite` or `gradient-not-finite`.
 * @property step The optimizer step that it would have been a part of.
 * @property parameters Of a gradient, the first ten parameters that were not updated with it.
 */
class NotFinite internal constructor(
    val errorCode: String,
    val step: Long,
    val parameters: List<String>,
) {
    internal fun raise(): Nothing = fail(
        errorCode,
        if (parameters.isEmpty()) "The loss of a batch of step $step is not finite."
        else "A gradient of step $step is not finite, of ${parameters.joinToString { "'$it'" }}.",
        "", "look for NaN in the batch; where there is none, lower the learning rate",
    )
}

/** A copy of tensors, with memory from its first use on. */
internal class Copy(private val originals: List<Tensor>) {
    private val copies by lazy { originals.map { zeros(it.type, it.shape) } }

    fun take() = originals.zip(copies).forEach { (own, copy) -> copy.copyFrom(own.bytes()) }

    fun putBack() = originals.zip(copies).forEach { (own, copy) -> own.copyFrom(copy.bytes()) }
}

private const val AT_ONCE = 4096

/** Whether all elements of a float32 or float64 tensor are finite: no exponent is all ones. */
internal fun isFinite(tensor: Tensor): Boolean {
    val single = tensor.type == Type.FLOAT
    val mask = if (single) 0x7F8000007F800000 else 0x7FF0000000000000
    val one = if (single) 0x0080000000800000 else 0x0010000000000000 // carries into the sign
    val signs = if (single) 0x0000000080000000L or Long.MIN_VALUE else Long.MIN_VALUE
    val bytes = tensor.bytes()
    val values = bytes.asLongBuffer()
    val part = LongArray(minOf(values.remaining(), AT_ONCE))
    while (values.hasRemaining()) {
        val count = minOf(values.remaining(), part.size)
        values.get(part, 0, count)
        var found = 0L
        for (i in 0 until count) found = found or (part[i] and mask) + one
        if (found and signs != 0L) return false
    }
    val odd = tensor.count.toInt() % (if (single) 2 else 1) == 1 // float32 that are not in pairs
    return !odd || tensor.real(tensor.count.toInt() - 1).isFinite()
}
