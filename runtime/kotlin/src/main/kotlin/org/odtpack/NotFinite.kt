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

/** Whether all elements of a floating tensor are finite. */
internal fun isFinite(tensor: Tensor): Boolean {
    if (tensor.type == Type.FLOAT) {
        val values = tensor.data.asFloatBuffer()
        return (0 until values.remaining()).all { values.get(it).isFinite() }
    }
    return (0 until tensor.count.toInt()).all { tensor.real(it).isFinite() }
}
