package org.odtpack

import ai.onnxruntime.*
import ai.onnxruntime.TensorInfo.OnnxTensorType
import ai.onnxruntime.platform.Fp16Conversions
import java.nio.*

/** Element types, by ONNX Runtime's names: that of numpy, the number of ONNX, and bytes. */
internal enum class Type(val label: String, val code: Int, val size: Int) {
    FLOAT("float32", 1, 4), DOUBLE("float64", 11, 8), FLOAT16("float16", 10, 2),
    BOOL("bool", 9, 1), INT8("int8", 3, 1), INT16("int16", 5, 2), INT32("int32", 6, 4),
    INT64("int64", 7, 8), UINT8("uint8", 2, 1), UINT16("uint16", 4, 2), UINT32("uint32", 12, 4),
    UINT64("uint64", 13, 8), STRING("string", 8, 0);

    val onnx = OnnxTensorType.valueOf("ONNX_TENSOR_ELEMENT_DATA_TYPE_$name")

    /** What the Java binding has; null for what it has not. */
    val java = OnnxJavaType.values().find { it.name == name && size > 0 }

    val floating get() = this == FLOAT || this == DOUBLE || this == FLOAT16

    companion object {
        fun of(label: String) = values().find { it.label == label } ?: Json.invalid("there is no type '$label'")

        fun of(code: Int): Type? = values().find { it.code == code && it.size > 0 }

        fun of(onnx: OnnxTensorType): Type? = values().find { it.onnx == onnx && it.java != null }
    }
}

/** As numpy calls it; as ONNX Runtime does where numpy has none. */
internal val OnnxTensorType.label get() = Type.values().find { it.onnx == this }?.label ?: name

/** The number of elements of a shape. */
internal val LongArray.count get() = fold(1L, Long::times)

/** Whether a shape agrees with one that may vary where it is below 0; an empty one promises nothing. */
internal fun LongArray.allows(other: LongArray) =
    isEmpty() || size == other.size && indices.all { this[it] < 0 || this[it] == other[it] }

/** A part of a buffer, of [size] bytes. */
internal fun ByteBuffer.part(start: Int, size: Int): ByteBuffer = duplicate().run {
    limit(start + size)
    position(start)
    slice().order(ByteOrder.LITTLE_ENDIAN)
}

internal fun littleEndian(size: Int): ByteBuffer = ByteBuffer.allocate(size).order(ByteOrder.LITTLE_ENDIAN)

/** An array in row-major order, in direct memory that it may share with others. */
internal class Tensor(val type: Type, val shape: LongArray, val data: ByteBuffer) {
    val count get() = shape.count

    val description get() = type.label + shape.contentToString()

    /** A part of the same memory, from an element on. */
    fun from(offset: Long, part: LongArray) =
        Tensor(type, part, data.part((offset * type.size).toInt(), (part.count * type.size).toInt()))

    fun reshaped(other: LongArray) = Tensor(type, other, data)

    /** The bytes from the first to the last, with a position of their own. */
    fun bytes(): ByteBuffer = data.part(0, data.capacity())

    fun copyFrom(source: ByteBuffer) {
        bytes().put(source)
    }

    fun copy() = zeros(type, shape).also { it.copyFrom(bytes()) }

    /** The same memory as ONNX Runtime sees it. */
    fun onnx(env: OrtEnvironment): OnnxTensor = OnnxTensor.createTensor(
        env, bytes(), shape, type.java ?: fail("parameter-type", "ONNX Runtime for Java has no ${type.label}."),
    )

    /** An element as a number, of a floating type. */
    fun real(index: Int): Double = when (type) {
        Type.FLOAT -> data.getFloat(4 * index).toDouble()
        Type.DOUBLE -> data.getDouble(8 * index)
        else -> Fp16Conversions.fp16ToFloat(data.getShort(2 * index)).toDouble()
    }

    /** Set an element, of any type. */
    operator fun set(index: Int, value: Double) {
        when (type) {
            Type.FLOAT -> data.putFloat(4 * index, value.toFloat())
            Type.DOUBLE -> data.putDouble(8 * index, value)
            Type.FLOAT16 -> data.putShort(2 * index, Fp16Conversions.floatToFp16(value.toFloat()))
            // The lowest byte of a whole number comes first.
            else -> for (i in 0 until type.size) data.put(index * type.size + i, (value.toLong() shr 8 * i).toByte())
        }
    }

    /** The same values in another floating type. */
    fun converted(other: Type): Tensor {
        if (other == type) return this
        if (!type.floating || !other.floating) {
            fail("parameter-type", "There is no way from ${type.label} to ${other.label}.")
        }
        val result = zeros(other, shape)
        for (i in 0 until count.toInt()) {
            val value = real(i)
            if (other == Type.FLOAT16 && Math.abs(value) >= 65520 && !value.isInfinite()) {
                fail("value-out-of-range", "A parameter is $value, which float16 does not hold.",
                    "train with a lower learning rate, or from a float32 model")
            }
            result[i] = value
        }
        return result
    }
}

private const val ALIGNMENT = 64 // a cache line, and the widest vector load

/** Zeros that start at a multiple of 64 bytes. */
internal fun zeros(type: Type, shape: LongArray): Tensor {
    val bytes = shape.fold(type.size.toLong(), Long::times)
    if (bytes > Int.MAX_VALUE - ALIGNMENT) {
        fail("model-too-large", "$bytes bytes are more than one buffer of Java holds.")
    }
    val whole = try {
        ByteBuffer.allocateDirect(bytes.toInt() + ALIGNMENT)
    } catch (_: OutOfMemoryError) {
        fail("model-too-large", "There is no direct memory for $bytes bytes.",
            "android:largeHeap=\"true\" on Android, -XX:MaxDirectMemorySize on the JVM")
    }
    return Tensor(type, shape, whole.part((ALIGNMENT - past(whole)) % ALIGNMENT, bytes.toInt()))
}

/** One value, of which a model reads. */
internal fun scalar(type: Type, value: Double = 0.0) = zeros(type, longArrayOf(1)).also { it[0] = value }

/**
 * Bytes past the last aligned address: Java 9 and Android 34 say so, and older Android has it in a
 * field; 0 where nothing tells, which costs only speed.
 */
private fun past(buffer: ByteBuffer): Int = runCatching {
    val int = Int::class.java
    ByteBuffer::class.java.getMethod("alignmentOffset", int, int).invoke(buffer, 0, ALIGNMENT) as Int
}.recoverCatching {
    val field = Buffer::class.java.getDeclaredField("address").apply { isAccessible = true }
    (field.getLong(buffer) % ALIGNMENT).toInt()
}.getOrDefault(0)
