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
class NotFinite internal constructor(val errorCode: String, val step: Long, val parameters: List<String>) {
    internal fun raise(): Nothing = fail(
        errorCode,
        if (parameters.isEmpty()) "The loss of a batch of step $step is not finite."
        else "A gradient of step $step is not finite, of ${parameters.joinToString { "'$it'" }}.",
        "look for NaN in the batch; where there is none, lower the learning rate",
    )
}

/** A copy of tensors, with memory from its first use on. */
internal class Copy(private val originals: List<Tensor>) {
    private val copies by lazy { originals.map { zeros(it.type, it.shape) } }

    fun take() = originals.zip(copies).forEach { (own, copy) -> copy.copyFrom(own.bytes()) }

    fun putBack() = originals.zip(copies).forEach { (own, copy) -> own.copyFrom(copy.bytes()) }
}

private const val AT_ONCE = 4096
private const val EXPONENT = 0x7F800000 // of a float32: all of these bits are set if it is not finite
private const val LOWEST_BIT = 0x00800000 // one more exponent, which then carries into the sign

/** Whether all elements of a floating tensor are finite. */
internal fun isFinite(tensor: Tensor): Boolean {
    if (tensor.type != Type.FLOAT) return (0 until tensor.count.toInt()).all { tensor.real(it).isFinite() }
    // Each step asks this of all gradients. One by one from the buffer takes seven times as long.
    val all = tensor.data.asIntBuffer()
    val some = IntArray(minOf(all.remaining(), AT_ONCE))
    var carried = 0
    while (all.hasRemaining()) {
        val count = minOf(all.remaining(), AT_ONCE)
        all.get(some, 0, count)
        for (i in 0 until count) carried = carried or ((some[i] and EXPONENT) + LOWEST_BIT)
    }
    return carried >= 0
}
