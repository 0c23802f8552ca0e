package org.odtpack

import java.nio.*

/**
 * Move the trainable parameters of a state into one flat vector, at the manifest's offsets; they
 * are returned in the order of memory. A state that a session placed before stays where it is.
 */
internal fun place(pack: TrainingPackage, state: State): List<Spec> {
    val layout = pack.manifest["layout"]
    val type = Type.of(layout["dtype"].text("float32"))
    val fresh = state.flat == null
    for (spec in pack.parameters) {
        val own = state.parameters[spec.name]
        val fits = own != null && own.trainable == spec.trainable && own.value.type == spec.type &&
            (!spec.trainable || spec.type == type) &&
            (own.value.shape.contentEquals(spec.shape) || state.nominal && fresh)
        if (!fits) mismatch("the package has '${spec.name}' as ${spec.description}")
    }
    if (state.parameters.size != pack.parameters.size) mismatch("one has parameters that the other does not know")
    val trainable = pack.trainable.sortedBy { it.offset }
    val elements = layout["elements"].whole()
    val places = Pair(elements, trainable.map { Pair(it.name, it.offset) })
    if (!fresh && state.layout != places) {
        mismatch("the state belongs to a session whose package lays its parameters out differently")
    }
    val flat = state.flat ?: zeros(type, longArrayOf(elements))
    for (spec in pack.parameters) {
        val own = state.parameters.getValue(spec.name)
        val given = own.value.takeUnless { state.nominal && fresh }
        if (spec.trainable && fresh) {
            own.value = flat.from(spec.offset, spec.shape)
            given?.let { own.value.copyFrom(it.bytes()) }
        } else if (given == null) {
            own.value = zeros(spec.type, spec.shape)
        }
    }
    state.flat = flat
    state.layout = places
    return trainable
}

/** The parameters one after the other, as floating numbers of the layout's type. */
internal class Contiguous(private val all: List<Spec>, private val state: State) {
    private val type get() = state.flat!!.type

    fun read(onlyTrainable: Boolean): ByteBuffer {
        state.requireValues()
        val chosen = chosen(onlyTrainable)
        val buffer = ByteBuffer.allocateDirect(size(chosen)).order(ByteOrder.LITTLE_ENDIAN)
        for (spec in chosen) buffer.put(state.value(spec.name).converted(type).bytes())
        buffer.flip()
        return buffer
    }

    fun write(buffer: ByteBuffer, onlyTrainable: Boolean) {
        if (onlyTrainable) state.requireValues()
        val chosen = chosen(onlyTrainable)
        val size = size(chosen)
        if (buffer.remaining() != size) {
            fail("buffer-size", "The buffer holds ${buffer.remaining()} bytes, and not $size.")
        }
        var at = buffer.position()
        // All are converted before the first is set: a value out of range changes nothing.
        val given = chosen.map { spec ->
            val part = buffer.part(at, spec.shape.count.toInt() * type.size)
            at += part.capacity()
            Tensor(type, spec.shape, part).converted(spec.type)
        }
        for ((spec, value) in chosen.zip(given)) state.value(spec.name).copyFrom(value.bytes())
        state.nominal = false
    }

    private fun chosen(onlyTrainable: Boolean) = all.filter { it.trainable || !onlyTrainable }

    private fun size(chosen: List<Spec>): Int {
        chosen.find { !it.type.floating || it.type.size > type.size }?.let {
            fail("parameter-type", "'${it.name}' is ${it.description}, which does not fit into the buffer.",
                "pass onlyTrainable = true")
        }
        return chosen.sumOf { state.value(it.name).count }.toInt() * type.size
    }
}
