@file:JvmName("Benchmark")

package org.odtpack

import ai.onnxruntime.*
import ai.onnxruntime.OrtSession.SessionOptions
import java.io.*
import java.nio.ByteBuffer

/**
 * Measure matrix products, convolutions, copies and storage, each five times: about half a minute.
 * Returns JSON for `odtpack devices import` (docs/formats/measurements.md).
 *
 * @param folder where a file is written, timed and removed.
 * @param memoryLimit bytes that the system grants the app (ActivityManager on Android); 0 if it does
 *   not tell.
 * @throws OdtpackException `file-not-written` if the folder cannot be written to.
 */
@JvmOverloads @Throws(OrtException::class)
fun benchmark(
    env: OrtEnvironment,
    folder: String,
    threads: Int,
    memoryLimit: Long = 0,
    fileBytes: Int = 64 shl 20,
): String {
    val found = sortedMapOf<String, MutableList<Double>>("read_bytes_per_second" to ArrayList())
    val add = { name: String, value: Double -> found.getOrPut(name) { ArrayList() }.add(value) }
    val products = { count: Int ->
        listOf(256L, 512L, 1024L).maxOf { size ->
            val square = longArrayOf(size, size)
            2.0 * size * size * size / operatorSeconds(env, "MatMul", listOf(square, square, square), count)
        }
    }
    val images = listOf(longArrayOf(4, 64, 58, 58), longArrayOf(64, 64, 3, 3), longArrayOf(4, 64, 56, 56))
    val elements = longArrayOf(16L shl 20)
    repeat(5) { // in turns: a slow minute shows in each
        add("gemm_flops", products(threads))
        add("gemm_single_flops", if (threads == 1) found["gemm_flops"]!!.last() else products(1))
        val work = 2.0 * 4 * 64 * 56 * 56 * 64 * 9
        add("convolution_flops", work / operatorSeconds(env, "Conv", images, threads))
        val seconds = operatorSeconds(env, "Neg", listOf(elements, elements), 1)
        add("copy_bytes_per_second", 4.0 * elements[0] / seconds)
        timeStorage(File(folder), fileBytes, add) // no call of Java drops the pages of a file
    }
    val about = mapOf(
        "format" to 1, "kit" to "\"kotlin\"", "onnxruntime" to "\"${env.version}\"", "system" to system(),
        "threads" to threads, "file_bytes" to fileBytes, "memory_bytes" to memoryBytes(),
        "memory_limit_bytes" to memoryLimit.takeIf { it > 0 },
    )
    return (about + found).entries.joinToString(", ", "{", "}") { (name, value) -> "\"$name\": $value" }
}

private fun timeStorage(folder: File, bytes: Int, add: (String, Double) -> Boolean) {
    val path = File(folder, ".odtpack-benchmark")
    val block = ByteBuffer.allocateDirect(1 shl 20)
    try {
        RandomAccessFile(path, "rw").use { file ->
            val timed = { count: Int ->
                seconds {
                    for (done in 0 until count step block.capacity()) {
                        file.channel.writeAll(block.part(0, minOf(block.capacity(), count - done)))
                    }
                    file.channel.force(true)
                }
            }
            add("write_bytes_per_second", bytes / timed(bytes))
            repeat(8) { add("sync_seconds", timed(4096)) }
        }
    } catch (error: IOException) {
        notWritten(path, error)
    } finally {
        path.delete()
    }
}

/** As a device profile names it; null if no profile does. */
private fun system(): String? {
    val name = System.getProperty("os.name").orEmpty()
    return when {
        System.getProperty("java.vm.name") == "Dalvik" -> "\"android\""
        name == "Linux" -> "\"linux\""
        name.startsWith("Mac") -> "\"macos\""
        name.startsWith("Windows") -> "\"windows\""
        else -> null
    }
}

/** Memory of the device, where Linux or Android tells. */
private fun memoryBytes(): Long? = try {
    File("/proc/meminfo").useLines { lines ->
        lines.find { it.startsWith("MemTotal:") }?.filter(Char::isDigit)?.toLong()?.times(1024)
    }
} catch (_: IOException) {
    null
}

private fun seconds(work: () -> Unit): Double {
    val start = System.nanoTime()
    work()
    return (System.nanoTime() - start) * 1e-9
}

/** Seconds of one run of an operator: the best of at least five in 0.3 seconds. */
private fun operatorSeconds(env: OrtEnvironment, kind: String, shapes: List<LongArray>, threads: Int): Double =
    SessionOptions().use { options ->
        options.setIntraOpNumThreads(threads)
        env.createSession(oneOperator(kind, shapes.size), options).use { session ->
            val tensors = shapes.mapIndexed { i, shape ->
                val tensor = zeros(Type.FLOAT, shape)
                for (each in 0 until tensor.count.toInt()) tensor.data.putFloat(4 * each, 0.5f)
                "t$i" to tensor.onnx(env)
            }
            val inputs = tensors.dropLast(1).toMap()
            val result = mapOf(tensors.last())
            val times = ArrayList<Double>()
            while (times.size < 5 || times.sum() < 0.3) {
                times.add(seconds { session.run(inputs, emptySet(), result, null).close() })
            }
            for ((_, tensor) in tensors) tensor.close()
            times.min()
        }
    }

/** A model of one operator without attributes on float32 tensors, the last of which is its result. */
private fun oneOperator(kind: String, count: Int): ByteArray {
    fun field(number: Int, content: ByteArray) = nested(number * 8 + 2, content)
    val float = field(2, field(1, byteArrayOf(0x08, 0x01))) // of any shape
    val names = (0 until count).map { field(1, "t$it".toByteArray()) }
    val node = names.dropLast(1).fold(ByteArray(0), ByteArray::plus) +
        field(2, "t${count - 1}".toByteArray()) + field(4, kind.toByteArray())
    val values = names.mapIndexed { i, name -> field(if (i == count - 1) 12 else 11, name + float) }
    val graph = values.fold(field(1, node) + field(2, "operator".toByteArray()), ByteArray::plus)
    // IR version 8, opset 17
    return byteArrayOf(0x08, 0x08) + field(8, byteArrayOf(0x10, 0x11)) + field(7, graph)
}
