package org.odtpack

import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.TensorInfo.OnnxTensorType
import ai.onnxruntime.TensorInfo.OnnxTensorType.*
import java.lang.reflect.Field
import java.lang.reflect.Method
import java.nio.Buffer
import java.nio.ByteBuffer
import java.nio.ByteOrder

/** Element types: the name of numpy, the number of ONNX, bytes, and what the Java binding has. */
internal enum class Type(
    val label: String,
    val code: Int,
    val size: Int,
    val onnx: OnnxTensorType,
    val java: OnnxJavaType?,
) {
    FLOAT("float32", 1, 4, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, OnnxJavaType.FLOAT),
    DOUBLE("float64", 11, 8, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, OnnxJavaType.DOUBLE),
    HALF("float16", 10, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, OnnxJavaType.FLOAT16),
    BOOL("bool", 9, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, OnnxJavaType.BOOL),
    INT8("int8", 3, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, OnnxJavaType.INT8),
    INT16("int16", 5, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, OnnxJavaType.INT16),
    INT32("int32", 6, 4, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, OnnxJavaType.INT32),
    INT64("int64", 7, 8, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, OnnxJavaType.INT64),
    UINT8("uint8", 2, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, OnnxJavaType.UINT8),
    UINT16("uint16", 4, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, null),
    UINT32("uint32", 12, 4, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32, null),
    UINT64("uint64", 13, 8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64, null),
    TEXT("string", 8, 0, ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING, null);

    val floating get() = this == FLOAT || this == DOUBLE || this == HALF

    companion object {
        fun of(label: String) =
            values().find { it.label == label } ?: Json.invalid("there is no type '$label'")

        fun of(code: Int): Type? = values().find { it.code == code && it.size > 0 }
    }
}

/** An array in row-major order, in direct memory that it may share with others. */
internal class Tensor(val type: Type, val shape: LongArray, val data: ByteBuffer) {
    val count get() = shape.fold(1L, Long::times)

    val description get() = type.label + shape.contentToString()

    /** A part of the same memory, from an element on. */
    fun from(offset: Long, part: LongArray): Tensor {
        val view = data.duplicate()
        val start = (offset * type.size).toInt()
        view.limit(start + (part.fold(1L, Long::times) * type.size).toInt())
        view.position(start)
        return Tensor(type, part, view.slice().order(ByteOrder.LITTLE_ENDIAN))
    }

    fun reshaped(other: LongArray) = Tensor(type, other, data)

    /** The bytes from the first to the last, with a position of their own. */
    fun bytes(): ByteBuffer {
        val view = data.duplicate().order(ByteOrder.LITTLE_ENDIAN)
        view.clear()
        return view
    }

    fun copyFrom(source: ByteBuffer) {
        bytes().put(source)
    }

    fun copy() = zeros(type, shape).also { it.copyFrom(bytes()) }

    /** The same memory as ONNX Runtime sees it. */
    fun onnx(env: OrtEnvironment): OnnxTensor {
        val java = type.java
            ?: fail("parameter-type", "ONNX Runtime for Java has no ${type.label}.")
        return OnnxTensor.createTensor(env, bytes(), shape, java)
    }

    /** An element as a number, of a floating type. */
    fun real(index: Int): Double = when (type) {
        Type.FLOAT -> data.getFloat(4 * index).toDouble()
        Type.DOUBLE -> data.getDouble(8 * index)
        else -> widen(data.getShort(2 * index)).toDouble()
    }

    fun setReal(index: Int, value: Double) {
        when (type) {
            Type.FLOAT -> data.putFloat(4 * index, value.toFloat())
            Type.DOUBLE -> data.putDouble(8 * index, value)
            else -> data.putShort(2 * index, narrow(value.toFloat()))
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
            if (other == Type.HALF && Math.abs(value) >= 65520 && !value.isInfinite()) {
                fail(
                    "value-out-of-range", "A parameter is $value, which float16 does not hold.", "",
                    "train with a lower learning rate, or from a float32 model",
                )
            }
            result.setReal(i, value)
        }
        return result
    }
}

/** A float32 as bits of float16, rounded to the nearest, ties to even. */
private fun narrow(value: Float): Short {
    val bits = value.toRawBits()
    val sign = bits ushr 16 and 0x8000
    val size = bits and 0x7FFFFFFF
    if (size >= 0x47800000) { // 2^16, infinite or not a number
        return (sign or if (size > 0x7F800000) 0x7E00 else 0x7C00).toShort()
    }
    if (size < 0x38800000) { // in units of 2^-24, below the smallest normal number
        return (sign or Math.rint(Math.abs(value.toDouble()) * (1 shl 24)).toInt()).toShort()
    }
    val rounded = size + 0xFFF + (size ushr 13 and 1) - (112 shl 23)
    return (sign or (rounded ushr 13)).toShort()
}

private fun widen(bits: Short): Float {
    val exponent = bits.toInt() ushr 10 and 31
    val fraction = bits.toInt() and 1023
    val size = when (exponent) {
        31 -> if (fraction == 0) Float.POSITIVE_INFINITY else Float.NaN
        0 -> fraction / 16777216f
        else -> Math.scalb((1024 + fraction).toFloat(), exponent - 25)
    }
    return if (bits < 0) -size else size
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
        fail(
            "model-too-large", "There is no direct memory for $bytes bytes.", "",
            "android:largeHeap=\"true\" on Android, -XX:MaxDirectMemorySize on the JVM",
        )
    }
    whole.position((ALIGNMENT - Address.past(whole)) % ALIGNMENT)
    whole.limit(whole.position() + bytes.toInt())
    return Tensor(type, shape, whole.slice().order(ByteOrder.LITTLE_ENDIAN))
}

/** Where direct memory lies: Java 9 and Android 34 say so, and older Android has it in a field. */
private object Address {
    private val method: Method? = try {
        ByteBuffer::class.java.getMethod("alignmentOffset", Int::class.java, Int::class.java)
    } catch (_: NoSuchMethodException) {
        null
    }
    private val field: Field? = try {
        if (method != null) null else Buffer::class.java.getDeclaredField("address")
    } catch (_: NoSuchFieldException) {
        null
    }

    /** Bytes past the last aligned address; 0 where nothing tells, which costs only speed. */
    fun past(buffer: ByteBuffer): Int = when {
        method != null -> method.invoke(buffer, 0, ALIGNMENT) as Int
        field != null -> {
            field.isAccessible = true
            (field.getLong(buffer) % ALIGNMENT).toInt()
        }
        else -> 0
    }
}
