package org.odtpack

import ai.onnxruntime.*
import ai.onnxruntime.OrtSession.SessionOptions
import ai.onnxruntime.OrtSession.SessionOptions.OptLevel
import java.io.*
import java.nio.ByteBuffer
import java.nio.channels.FileChannel

// A decoder's weights as ONNX Runtime packs them for a processor, in a file that is mapped. To write
// that file ONNX Runtime has all packed weights in memory, so that they are packed part by part
// here, each part as a model of its own. Source of the entries "prepacked_0", ... of a tensor's
// external data, "key|offset;length;checksum|...": core/framework/tensor_external_data_info.cc.

private const val FOLDER = "odtpack.packed_weights" // session option: keeps packed weights there
private const val START = "odtpack-packed-" // starts the name of a folder in it
private const val LOCK = "odtpack-packed.lock" // one process at a time packs and opens
private const val PAGE = 4096

/** Entries of session options that decide how weights are packed. */
private val CHOICES = setOf("mlas.disable_kleidiai", "mlas.use_lut_gemm")

/** Bytes of weights that are packed together; the packed ones are all in memory until written. */
internal var packedAtOnce = 32L shl 20

// Fields of onnx.proto, as they begin on the wire.
private const val GRAPH = 0x3A
private const val FIRST = 0x0A // a graph's nodes, a node's inputs, the name of a value, a key
private const val SECOND = 0x12 // a graph's name, a node's outputs, the type of a value, a value
private const val INITIALIZER = 0x2A
private const val INPUT = 0x5A
private const val OUTPUT = 0x62
private const val VALUE_INFO = 0x6A
private const val OPERATOR = 0x22
private const val TENSOR_TYPE = 0x10
private const val TENSOR_NAME = 0x42
private const val EXTERNAL_DATA = 0x6A

/** Open a decoder, from packed weights where the options name a folder for them. */
internal fun openDecoder(env: OrtEnvironment, pack: TrainingPackage, options: SessionOptions): OrtSession {
    val folder = options.configEntries[FOLDER] ?: return openSession(env, pack.decoder, options)
    val target = File(folder, START + packedKey(env, pack, options))
    val model = File(target, "decoder.onnx").path
    File(folder).mkdirs() // packing says what is wrong with it
    // Until it is open: whoever packs another decoder removes this one.
    return uninterrupted { synchronized(PackedParts) { locked(File(folder, LOCK)).use {
        try {
            if (File(target, "sizes").readText() == sizes(target)) return@uninterrupted openSession(env, model, options)
        } catch (_: IOException) { // some is missing, or damaged: write it anew
        } catch (_: OdtpackException) {
        }
        write(env, pack, options, target)
        openSession(env, model, options)
    } } }
}

/** Wait for other processes until what is returned is closed; null where nothing can be locked. */
private fun locked(file: File) = runCatching { RandomAccessFile(file, "rw").apply { lock(channel) } }.getOrNull()

/** The sizes of the model and its weights: ONNX Runtime maps what it does not check. */
private fun sizes(folder: File) = "${File(folder, "decoder.onnx").length()} ${File(folder, "decoder.weights").length()}"

/** Write the decoder with its weights packed into a folder, whole or not at all. */
private fun write(env: OrtEnvironment, pack: TrainingPackage, options: SessionOptions, target: File) {
    val folder = target.parentFile!!
    val stage = File("${target.path}.part")
    try {
        for (stale in folder.listFiles().orEmpty()) if (stale.name.startsWith(START)) stale.deleteRecursively()
        if (!stage.mkdirs()) throw IOException("the folder cannot be made")
        // The optimized decoder first, with its weights as they are: what it folds is there.
        save(env, options, File(pack.decoder), File(stage, "decoder.onnx"), packed = false)
        PackedParts(env, options, stage).pack()
        File(stage, "sizes").writeText(sizes(stage))
        for (file in stage.listFiles().orEmpty()) RandomAccessFile(file, "rw").use { it.channel.force(true) }
        rename(stage, target)
        forceFolder(folder)
    } catch (error: Exception) {
        fail("packed-not-written", "Packed weights cannot be written: ${error.message}",
            "name a folder with room for the decoder's weights twice", folder.path)
    } finally {
        stage.deleteRecursively()
    }
}

/** What packed weights depend on; ONNX Runtime does not check where they are from. */
private fun packedKey(env: OrtEnvironment, pack: TrainingPackage, options: SessionOptions): String {
    val names = listOf("flags", "Features", "model name", "CPU implementer", "CPU part")
    val processor = runCatching { File("/proc/cpuinfo").readLines() }.getOrDefault(emptyList())
        .filter { line -> names.any(line::startsWith) }.toSortedSet()
    val manifest = hex(sha256(File(pack.folder, MANIFEST)))
    val choices = options.configEntries.filterKeys { it in CHOICES }.toSortedMap()
    val text = listOf(manifest, env.version, System.getProperty("os.arch"), processor, choices)
    return hex(sha256(ByteBuffer.wrap(text.joinToString("\n").toByteArray()))).take(16)
}

/** Let ONNX Runtime write a model and its weights, packed or as they are. */
private fun save(env: OrtEnvironment, like: SessionOptions, model: File, out: File, packed: Boolean) =
    SessionOptions().use { options ->
        options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR)
        options.setOptimizationLevel(if (packed) OptLevel.NO_OPT else OptLevel.EXTENDED_OPT)
        options.setOptimizedModelFilePath(out.path)
        val weights = "session.optimized_model_external_initializers"
        val entries = mapOf(
            "${weights}_file_name" to "${out.nameWithoutExtension}.weights",
            "${weights}_min_size_in_bytes" to "1024",
            "session.save_external_prepacked_constant_initializers" to if (packed) "1" else "0",
            "session.disable_prepacking" to if (packed) "0" else "1",
        ) + like.configEntries.filterKeys { it in CHOICES }
        for ((key, value) in entries) options.addConfigEntry(key, value)
        openSession(env, model.path, options).close()
    }

/**
 * Packs the weights of a decoder that ONNX Runtime has written into a folder with its weights as they
 * are, behind those in its file.
 */
private class PackedParts(
    private val env: OrtEnvironment,
    private val options: SessionOptions,
    private val stage: File,
) {
    private val model = ByteBuffer.wrap(File(stage, "decoder.onnx").readBytes())
    private val graph = model.each(GRAPH).last()
    private val given = graph.each(INPUT).map { it.text(FIRST) }.toSet() // an adapter's tensors, too
    private val values = (graph.each(INPUT) + graph.each(VALUE_INFO)).associateBy { it.text(FIRST) }
    private val tensors = graph.each(INITIALIZER).associateBy { it.text(TENSOR_NAME) } - given
    private val entries = HashMap<String, ByteArray>()

    fun pack() {
        val part = ArrayList<ByteBuffer>()
        var size = 0L
        for (node in graph.each(FIRST)) {
            val more = weightBytes(node)
            if (more == 0L) continue
            if (size > 0 && size + more > packedAtOnce) {
                add(part)
                part.clear()
                size = 0
            }
            part.add(node)
            size += more
        }
        if (part.isNotEmpty()) add(part)
        val changed = rewritten(graph, INITIALIZER) { tensor ->
            entries[tensor.text(TENSOR_NAME)]?.let { tensor.toBytes() + it }
        }
        File(stage, "decoder.onnx").writeBytes(rewritten(model, GRAPH) { changed })
    }

    /** A message with other contents of a field, where there is one. */
    private fun rewritten(message: ByteBuffer, tag: Int, content: (ByteBuffer) -> ByteArray?): ByteArray {
        val result = ByteArrayOutputStream()
        for (field in fields(message.duplicate())) {
            val other = if (field.tag == tag) content(field.content) else null
            if (other == null) result.write(field.whole.toBytes()) else result.put(tag, other)
        }
        return result.toByteArray()
    }

    /** Bytes of weights that a product has in the file. */
    private fun weightBytes(node: ByteBuffer): Long {
        val kind = node.text(OPERATOR)
        if ("MatMul" !in kind && kind != "Gemm") return 0
        return node.texts(FIRST).mapNotNull(tensors::get).flatMap { it.each(EXTERNAL_DATA) }
            .filter { it.text(FIRST) == "length" }.sumOf { it.text(SECOND).toLong() }
    }

    /** Pack the weights of some products. */
    private fun add(nodes: List<ByteBuffer>) {
        val source = File(stage, "part.onnx")
        val packed = File(stage, "packed.onnx")
        val data = File(stage, "packed.weights")
        source.writeBytes(modelOf(nodes))
        save(env, options, source, packed, packed = true)
        val written = ByteBuffer.wrap(packed.readBytes()).each(GRAPH).last().each(INITIALIZER)
        RandomAccessFile(data, "r").use { from ->
            RandomAccessFile(File(stage, "decoder.weights"), "rw").use { weights ->
                for (tensor in written) {
                    if (tensor.text(TENSOR_NAME) in entries) continue // a weight of another part, too
                    val moved = ByteArrayOutputStream()
                    for (entry in tensor.each(EXTERNAL_DATA)) {
                        val key = entry.text(FIRST)
                        if (!key.startsWith("prepacked")) continue
                        val value = moved(entry.text(SECOND), from.channel, weights)
                        val where = nested(FIRST, key.toByteArray()) + nested(SECOND, value.toByteArray())
                        moved.put(EXTERNAL_DATA, where)
                    }
                    entries[tensor.text(TENSOR_NAME)] = moved.toByteArray()
                }
            }
        }
        for (file in listOf(source, packed, data)) file.delete()
    }

    /** A model of some products alone. */
    private fun modelOf(nodes: List<ByteBuffer>): ByteArray {
        val made = nodes.flatMap { it.texts(SECOND) }.toSet()
        val done = HashSet<String>()
        val part = ByteArrayOutputStream()
        part.put(SECOND, "part".toByteArray())
        for (node in nodes) {
            part.put(FIRST, node.toBytes())
            val weights = node.texts(FIRST).filter { it in tensors }
            for (name in weights) if (done.add(name)) part.put(INITIALIZER, tensors.getValue(name).toBytes())
            // A value without a type has that of the numbers that the weights are, or are scaled by.
            val codes = weights.map { name ->
                fields(tensors.getValue(name).duplicate()).last { it.tag == TENSOR_TYPE }.whole.toBytes().last()
            }
            val code = codes.firstOrNull { it in FLOATING } ?: codes.first()
            val type = nested(SECOND, nested(FIRST, byteArrayOf(8, code)))
            for (name in node.texts(FIRST) + node.texts(SECOND)) {
                if (name.isEmpty() || name in tensors || !done.add(name)) continue
                val value = values[name]?.toBytes() ?: (nested(FIRST, name.toByteArray()) + type)
                part.put(if (name in made) OUTPUT else INPUT, value)
            }
        }
        val kept = fields(model.duplicate()).filter { it.tag == 0x08 || it.tag == 0x42 } // IR version, opsets
        return kept.fold(ByteArray(0)) { all, each -> all + each.whole.toBytes() } + nested(GRAPH, part.toByteArray())
    }

    /** Append to the file what an entry says is packed; the entry of where it is there. */
    private fun moved(entry: String, from: FileChannel, weights: RandomAccessFile): String {
        val places = entry.split('|')
        return places.first() + places.drop(1).joinToString("") { place ->
            val (offset, length, checksum) = place.split(';')
            val start = (weights.length() + PAGE - 1) / PAGE * PAGE
            weights.setLength(start)
            weights.seek(start)
            var done = 0L
            while (done < length.toLong()) {
                val count = from.transferTo(offset.toLong() + done, length.toLong() - done, weights.channel)
                if (count <= 0) throw IOException("the packed weights end early")
                done += count
            }
            "|$start;$length;$checksum"
        }
    }

    companion object {
        private val FLOATING = setOf<Byte>(1, 10) // codes of float32 and float16
    }
}
