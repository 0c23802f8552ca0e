package org.odtpack

import java.io.ByteArrayOutputStream
import java.io.File
import java.nio.ByteBuffer

private const val MOST_BYTES = (1L shl 31) - (1L shl 20)

/**
 * The parts of an inference model with the parameters of a state: the template's bytes, then a
 * fragment of protobuf for each parameter. Messages that are concatenated are one message.
 */
internal fun inferenceModel(
    pack: TrainingPackage,
    state: State,
    outputs: Collection<String>,
): List<ByteBuffer> {
    state.requireValues()
    if (pack.hasSegments) {
        fail(
            "segments-unsupported", "A package of segments holds no model for inference.", "",
            "use odtpack adapter export PACKAGE --checkpoint FILE",
        )
    }
    if (outputs.isEmpty() || outputs.toSet().size != outputs.size) {
        fail("no-outputs", "An exported model needs outputs, and each only once.")
    }
    val parts = ArrayList<ByteBuffer>()
    withOutputs(map(File(pack.path("inference_template"))), outputs.toMutableSet(), parts)
    for (entry in pack.manifest["inference"]["parameters"].list()) {
        val spec = pack.parameters.first { it.name == entry.text() }
        val tensor = inModelType(spec, state)
        val bytes = tensor.bytes()
        val name = spec.name.toByteArray()
        val head = ByteArrayOutputStream()
        for (size in tensor.shape) head.field(0x08, size)
        head.field(0x10, tensor.type.code.toLong())
        head.put(0x42, name)
        head.field(0x4A, bytes.remaining().toLong())
        val inner = ByteArrayOutputStream()
        inner.field(0x2A, head.size().toLong() + bytes.remaining())
        val outer = ByteArrayOutputStream()
        outer.field(0x3A, inner.size().toLong() + head.size() + bytes.remaining())
        for (each in listOf(outer, inner, head)) parts.add(ByteBuffer.wrap(each.toByteArray()))
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

internal fun ByteArrayOutputStream.field(tag: Int, value: Long) {
    write(tag)
    var rest = value
    while (rest >= 0x80) {
        write((rest or 0x80).toInt())
        rest = rest ushr 7
    }
    write(rest.toInt())
}

internal fun ByteArrayOutputStream.put(tag: Int, content: ByteArray) {
    field(tag, content.size.toLong())
    write(content, 0, content.size)
}

internal fun nested(tag: Int, content: ByteArray): ByteArray =
    ByteArrayOutputStream().apply { put(tag, content) }.toByteArray()

internal fun ByteBuffer.each(tag: Int): List<ByteBuffer> =
    fields(duplicate()).filter { it.first == tag.toLong() }.map { it.third }

internal fun ByteBuffer.texts(tag: Int): List<String> =
    each(tag).map { Charsets.UTF_8.decode(it.duplicate()).toString() }

internal fun ByteBuffer.text(tag: Int): String = texts(tag).lastOrNull().orEmpty()

/** The fields of a protobuf message: tag, the field with tag and length, and without. */
internal fun fields(message: ByteBuffer): List<Triple<Long, ByteBuffer, ByteBuffer>> {
    val bad = { fail("model-not-loadable", "A file of the package is not an ONNX model.") }
    val part = { start: Int, end: Int ->
        message.duplicate().apply {
            limit(end)
            position(start)
        }.slice()
    }
    fun number(): Long {
        var number = 0L
        for (shift in 0 until 64 step 7) {
            if (!message.hasRemaining()) bad()
            val byte = message.get().toLong()
            number = number or (byte and 0x7F shl shift)
            if (byte >= 0) return number
        }
        bad()
    }
    val found = ArrayList<Triple<Long, ByteBuffer, ByteBuffer>>()
    while (message.hasRemaining()) {
        val start = message.position()
        val tag = number()
        if (tag % 8 == 0L) number()
        val length = mapOf(1L to 8L, 5L to 4L)[tag % 8] ?: if (tag % 8 == 2L) number() else 0L
        val content = message.position()
        if (length !in 0..message.remaining()) bad()
        message.position(content + length.toInt())
        found.add(Triple(tag, part(start, message.position()), part(content, message.position())))
    }
    return found
}

/** The template with only the wanted ones of its outputs. */
private fun withOutputs(
    model: ByteBuffer,
    wanted: MutableSet<String>,
    parts: MutableList<ByteBuffer>,
) {
    for ((tag, whole, content) in fields(model)) {
        if (tag != 0x3AL) {
            parts.add(whole)
            continue
        }
        val kept = fields(content).filter { (of, _, value) ->
            of != 0x62L || wanted.remove(value.text(0x0A))
        }.map { it.second }
        val head = ByteArrayOutputStream()
        head.field(0x3A, kept.sumOf { it.remaining().toLong() })
        parts.add(ByteBuffer.wrap(head.toByteArray()))
        parts.addAll(kept)
    }
    wanted.firstOrNull()?.let { fail("unknown-output", "The inference model has no output '$it'.") }
}
