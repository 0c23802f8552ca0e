package org.odtpack

import java.io.File
import java.nio.ByteBuffer

private const val MOST_BYTES = (1L shl 31) - (1L shl 20)

/**
 * The parts of an inference model with the parameters of a state: the template's bytes, then a
 * fragment of protobuf for each parameter.
 */
internal fun inferenceModel(pack: TrainingPackage, state: State, outputs: Collection<String>): List<ByteBuffer> {
    state.requireValues()
    if (pack.hasSegments) {
        fail("segments-unsupported", "A package of segments holds no model for inference.",
            "use odtpack adapter export PACKAGE --checkpoint FILE")
    }
    if (pack.manifest["files"]["inference_template"].absent) {
        fail("no-outputs", "The model has no output but its loss: there is nothing to export.")
    }
    if (outputs.isEmpty() || outputs.toSet().size != outputs.size) {
        fail("no-outputs", "An exported model needs outputs, and each only once.")
    }
    val parts = ArrayList<ByteBuffer>()
    val template = mapped(File(pack.path("inference_template")), "package-incomplete", "copy the whole folder again")
    withOutputs(template, outputs.toMutableSet(), parts)
    for (name in pack.manifest["inference"]["parameters"].texts()) {
        val tensor = inModelType(pack.parameters.first { it.name == name }, state)
        val bytes = tensor.bytes()
        val size = bytes.remaining().toLong()
        val shape = tensor.shape.fold(ByteArray(0)) { all, axis -> all + field(0x08, axis) }
        val head = shape + field(0x10, tensor.type.code.toLong()) + nested(0x42, name.toByteArray()) + field(0x4A, size)
        val initializer = field(0x2A, head.size + size) + head
        parts.add(ByteBuffer.wrap(field(0x3A, initializer.size + size) + initializer))
        parts.add(bytes)
    }
    if (parts.sumOf { it.remaining().toLong() } > MOST_BYTES) {
        fail("model-too-large", "The model exceeds what one ONNX file holds.")
    }
    return parts
}

/** A parameter's value in the type that the inference model has for it. */
private fun inModelType(spec: Spec, state: State): Tensor {
    val value = state.value(spec.name)
    if (spec.scale.isEmpty()) return spec.modelType?.let(value::converted) ?: value
    val scale = state.value(spec.scale)
    if (scale.type != Type.FLOAT || value.type != Type.INT8 || scale.count == 0L) {
        Json.invalid("the scale of '${spec.name}'")
    }
    val axis = scale.shape.indexOfFirst { it != 1L }.coerceAtLeast(0)
    val inner = value.shape.drop(axis + 1).fold(1L, Long::times).coerceAtLeast(1)
    val result = zeros(Type.FLOAT, value.shape)
    for (i in 0 until value.count.toInt()) {
        val factor = scale.data.getFloat((4 * (i / inner % scale.count)).toInt())
        result.data.putFloat(4 * i, value.data.get(i).toFloat() * factor)
    }
    return result
}

/** The template with only the wanted ones of its outputs. */
private fun withOutputs(model: ByteBuffer, wanted: MutableSet<String>, parts: MutableList<ByteBuffer>) {
    for (field in fields(model)) {
        if (field.tag != 0x3A) {
            parts.add(field.whole)
            continue
        }
        val kept = fields(field.content).filter { it.tag != 0x62 || wanted.remove(it.content.text(0x0A)) }
        parts.add(ByteBuffer.wrap(field(0x3A, kept.sumOf { it.whole.remaining().toLong() })))
        kept.mapTo(parts) { it.whole }
    }
    wanted.firstOrNull()?.let { fail("unknown-output", "The inference model has no output '$it'.") }
}
