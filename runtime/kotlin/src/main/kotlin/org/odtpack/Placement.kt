package org.odtpack

/**
 * Move the trainable parameters of a state into one flat vector, at the manifest's offsets; they
 * are returned in the order of memory. A state that a session placed before stays where it is.
 */
internal fun place(pack: TrainingPackage, state: State): List<Spec> {
    val layout = pack.manifest["layout"]
    val type = Type.of(layout["dtype"].text("float32"))
    if (type != Type.FLOAT && type != Type.DOUBLE) Json.invalid("the dtype of 'layout'")
    val fresh = state.flat == null
    for (spec in pack.parameters) {
        val own = state.parameters[spec.name]
        val fits = own != null && own.trainable == spec.trainable && own.value.type == spec.type &&
            (!spec.trainable || spec.type == type) && spec.shape.all { it >= 0 } &&
            (own.value.shape.contentEquals(spec.shape) || state.nominal && fresh)
        if (!fits) mismatch("the package has '${spec.name}' as ${spec.description}")
    }
    val names = pack.parameters.map { it.name }
    if (state.parameters.keys != names.toSet() || names.toSet().size != names.size) {
        mismatch("one has parameters that the other does not know")
    }
    val trainable = pack.parameters.filter { it.trainable }.sortedBy { it.offset }
    val elements = endOf(trainable, 64L / type.size)
    if (layout["elements"].whole() != elements) Json.invalid("the elements of 'layout'")
    val flat = state.flat ?: zeros(type, longArrayOf(elements))
    state.gradients = zeros(type, longArrayOf(elements))
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
    return trainable
}

/** Where the last parameter ends: each begins at the next multiple of [line] elements. */
private fun endOf(trainable: List<Spec>, line: Long): Long {
    var end = 0L
    for (spec in trainable) {
        if (spec.offset != end) Json.invalid("the offset of '${spec.name}'")
        end += spec.shape.fold(1L, Long::times)
        end = (end + line - 1) / line * line
    }
    return end
}
