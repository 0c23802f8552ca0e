package org.odtpack

import java.io.File
import java.io.IOException
import java.nio.ByteBuffer

private const val TENSORS = "adapter_model.safetensors"
private const val CONFIG = "adapter_config.json"
private const val TABLE = ".base_layer.weight" // beside an embedding's adapter PEFT saves it
private const val MOST_HEADER = 1L shl 26 // bytes
private const val MOST_CONFIG = 1L shl 20
private val SAFE = mapOf("F32" to Type.FLOAT, "F64" to Type.DOUBLE, "F16" to Type.FLOAT16, "BF16" to Type.UINT16)

/** Settings of PEFT that change what the tensors mean, and the values that they have without. */
private val SETTINGS = listOf(
    "alora_invocation_tokens", "bias", "layer_replication", "lora_bias", "megatron_config", "rank_pattern",
    "alpha_pattern", "target_parameters", "trainable_token_indices", "use_qalora", "use_bdlora", "arrow_config",
    "kasa_config", "monteclora_config",
)
private val PLAIN = setOf(null, false, "none", emptyMap<String, Any>())
private val STARTS = setOf(null, true, false, "gaussian", "orthogonal", "eva")

private fun isOnnx(file: File) = file.extension == "onnx_adapter"

private fun File.writeParts(parts: List<ByteBuffer>) {
    writeAtomically(this) { channel -> parts.forEach(channel::writeAll) }
}

/** Write what a package trains with an adapter: one file of ONNX Runtime's, or PEFT's two. */
internal fun writeAdapter(pack: TrainingPackage, state: State, target: File) {
    val trained = trainedOf(pack, state)
    if (isOnnx(target)) {
        checkReplaced(target, isAdapter(target))
        return target.writeParts(listOf(onnxAdapter(trained)))
    }
    val names = peftNames(pack, trained)
    val own = peftConfig(pack)
    target.mkdirs()
    if (!target.isDirectory) notWritten(target, IOException("it is not a folder"))
    val (config, tensors) = listOf(CONFIG, TENSORS).map { File(target, it) }
    val isOurs = isOwnConfig(config, own)
    for (file in listOf(config, tensors)) checkReplaced(file, isOurs)
    // It comes first, as it says to the next save that the values are ours.
    config.writeParts(listOf(ByteBuffer.wrap(own.toByteArray())))
    tensors.writeParts(safetensors(trained.mapKeys { (name, _) -> names.getValue(name) }))
}

private fun isAdapter(file: File): Boolean {
    val start = ByteArray(8)
    val size = if (file.isFile) runCatching { file.inputStream().use { it.read(start) } }.getOrDefault(0) else 0
    return size == start.size && String(start, 4, 4, Charsets.ISO_8859_1) == "TORT"
}

/** Whether a configuration has no other settings than odtpack writes; PEFT itself writes more. */
private fun isOwnConfig(file: File, own: String): Boolean = file.isFile && try {
    val known = Json.read(own.toByteArray()).fields().keys
    readPeft(file, configText(file)) { it.fields().keys }.let { "peft_type" in it && known.containsAll(it) }
} catch (_: OdtpackException) {
    false
}

/** Refuse to replace a file, unless it is ours. */
private fun checkReplaced(file: File, isOurs: Boolean) {
    if (isOurs || !file.isFile) return
    fail("file-not-written", "${file.path} would be replaced, and it is not an adapter of this package.",
        "move the file, or choose another name or a new folder")
}

/** Set what a package trains to the values of such a file or folder, all of them or none. */
internal fun readAdapter(pack: TrainingPackage, state: State, source: File) {
    val trained = trainedOf(pack, state)
    val values = adapterValues(pack, trained, source)
    for ((name, own) in trained) own.copyFrom(values.getValue(name).bytes())
}

/** The values of such a file or folder, in the types and shapes of what is trained. */
internal fun adapterValues(pack: TrainingPackage, trained: Map<String, Tensor>, source: File): Map<String, Tensor> {
    val names: Map<String, String>
    val found: MutableMap<String, Tensor>
    if (isOnnx(source)) {
        names = trained.keys.associateWith { it }
        found = readOnnxAdapter(source)
    } else {
        names = peftNames(pack, trained)
        checkConfig(File(source, CONFIG), peftConfig(pack))
        found = readSafetensors(File(source, TENSORS))
        found.keys.removeAll { it.endsWith(TABLE) && it !in names.values }
    }
    val values = names.mapValues { (name, peft) ->
        val own = trained.getValue(name)
        val value = found.remove(peft) ?: mismatch("the adapter has no '$peft'", source)
        if (!value.shape.contentEquals(own.shape) || !value.type.floating) {
            mismatch("'$peft' is ${value.description} in the adapter, and ${own.description} in the package", source)
        }
        val taken = value.converted(own.type).copy() // no pages of a file that may still change
        if (!isFinite(taken)) {
            fail(if (isOnnx(source)) "adapter-corrupt" else "peft-invalid", "'$peft' holds NaN or infinity.",
                "use an adapter from before its training diverged", source.path)
        }
        taken
    }
    found.keys.firstOrNull()?.let { mismatch("the adapter has '$it', which the package does not train", source) }
    return values
}

private fun mismatch(what: String, where: File): Nothing = fail("adapter-mismatch", "$what.",
    "build the package with the adapter's kind, rank, alpha and layers", where.path)

internal fun trainedOf(pack: TrainingPackage, state: State): Map<String, Tensor> {
    if (pack.manifest["adapter"].absent) {
        fail("no-adapter", "The package was built without an adapter.", "build it with --adapter lora --on '*.q_proj'",
            pack.folder)
    }
    state.requireValues()
    val trained = state.parameters.filterValues { it.trainable }.mapValues { it.value.value }
    val wanted = pack.trainable.associate { it.name to it.description }
    (wanted.keys + trained.keys).find { trained[it]?.description != wanted[it] }?.let {
        fail("adapter-mismatch", "State and package do not train the same '$it'.",
            "use a checkpoint that was trained with this package")
    }
    return trained.toSortedMap()
}

private fun peftConfig(pack: TrainingPackage) = pack.manifest["adapter"]["peft"]["config"].text()

/** PEFT's names of the trained parameters, by these. */
private fun peftNames(pack: TrainingPackage, trained: Map<String, Tensor>): Map<String, String> {
    val peft = pack.manifest["adapter"]["peft"].given
        ?: fail("peft-without-kind", "PEFT has no file for what this package trains.",
            "name a file that ends in .onnx_adapter", pack.folder)
    val renamed = peft["names"].given?.fields().orEmpty()
    return trained.keys.associateWith { renamed[it]?.text() ?: it }
}

internal fun mapped(file: File, code: String, hint: String = "") = try {
    map(file)
} catch (error: IOException) {
    fail(code, "${file.path} cannot be read: ${error.message}.", hint)
}

/** A tensor over these bytes, if they are as many as it has. */
private fun tensorOf(type: Type?, shape: LongArray, bytes: ByteBuffer): Tensor? {
    val size = shape.fold(type?.size?.toDouble() ?: -1.0) { all, axis -> all * axis }
    val good = shape.size <= MOST_AXES && shape.all { it >= 0 } && size == bytes.remaining().toDouble()
    return if (type != null && good) Tensor(type, shape, bytes) else null
}

// ONNX Runtime's format, as onnxruntime/lora has it:
//
//     table Parameter { name: string; dims: [int64]; data_type: int32; raw_data: [uint8]; }
//     table Adapter { format_version: int32; adapter_version: int32; model_version: int32;
//                     parameters: [Parameter]; }

internal fun onnxAdapter(tensors: Map<String, Tensor>): ByteBuffer {
    val to = FlatBufferWriter(tensors.values.sumOf { it.data.capacity() + 256 } + 64)
    val tables = tensors.map { (name, tensor) ->
        val data = to.content(tensor.bytes())
        val dims = to.longs(tensor.shape)
        to.table(to.text(name), dims, tensor.type.code, data)
    }
    return to.finish(to.table(1, 1, 1, to.tables(tables)), "TORT")
}

private fun readOnnxAdapter(file: File): MutableMap<String, Tensor> {
    val bytes = mapped(file, "adapter-not-found", "pass a file that saveAdapter wrote")
    val source = FlatBuffer(bytes, file.path, "adapter")
    val root = source.root("TORT")
    source.check(root.int(0) == 1) { "its format is not 1" }
    val tensors = HashMap<String, Tensor>()
    var left = source.size
    for (table in root.tables(3)) {
        val data = table.content(3)
        left -= data?.remaining() ?: 0
        source.check(left >= 0) { "a parameter is too large" }
        val tensor = data?.let { tensorOf(Type.of(table.int(2)), table.sizes(1), it) }
        source.check(tensor != null && tensors.put(table.text(0), tensor) == null) {
            "a parameter is not a tensor of numbers"
        }
    }
    return tensors
}

// safetensors: the length of a header in 8 bytes, a header in JSON, and the elements.

private fun quoted(text: String) = text.map {
    if (it in " !" || it in '#'..'[' || it in ']'..'~') "$it" else "\\u%04x".format(it.code)
}.joinToString("", "\"", "\"")

private fun safetensors(tensors: Map<String, Tensor>): List<ByteBuffer> {
    val header = StringBuilder("""{"__metadata__":{"format":"pt"}""")
    var end = 0L
    val sorted = tensors.toSortedMap()
    for ((name, tensor) in sorted) {
        val start = end
        end += tensor.data.capacity()
        val type = SAFE.entries.find { it.value == tensor.type }?.key
            ?: fail("parameter-type", "PEFT has no file for ${tensor.description}.")
        val shape = tensor.shape.joinToString(",")
        header.append(",${quoted(name)}:{\"dtype\":\"$type\",\"shape\":[$shape],\"data_offsets\":[$start,$end]}")
    }
    header.append("}")
    while (header.length % 8 > 0) header.append(' ')
    val head = littleEndian(8 + header.length)
    head.putLong(header.length.toLong()).put(header.toString().toByteArray()).flip()
    return listOf(head) + sorted.values.map { it.bytes() }
}

private fun invalid(file: File, reason: String): Nothing = fail("peft-invalid", "${file.name} cannot be read: $reason.",
    "save the adapter again: model.save_pretrained(folder)", file.path)

/** JSON of a file; what is wrong with it is `peft-invalid`. */
private fun <T> readPeft(file: File, text: ByteArray, read: (Json) -> T): T = try {
    read(Json.read(text))
} catch (error: OdtpackException) {
    if (error.errorCode != "manifest-invalid") throw error
    invalid(file, "it is not JSON as it should be")
}

private fun mapPeft(file: File) =
    mapped(file, "peft-not-found", "pass the folder that model.save_pretrained(folder) wrote")

/** The first bytes of a buffer, which come to stand behind its position. */
private fun ByteBuffer.take(size: Long): ByteArray = ByteArray(size.toInt()).also(::get)

/** All tensors; bfloat16 becomes float32. */
private fun readSafetensors(file: File): MutableMap<String, Tensor> {
    val bytes = mapPeft(file)
    val size = if (bytes.remaining() < 8) 0 else bytes.getLong()
    if (size !in 2..minOf(MOST_HEADER, bytes.remaining().toLong())) invalid(file, "its header")
    val header = bytes.take(size)
    val data = bytes.slice()
    return readPeft(file, header) { json ->
        val tensors = HashMap<String, Tensor>()
        var end = 0L
        val entries = json.fields().filterKeys { it != "__metadata__" }.map { (name, entry) ->
            val places = entry["data_offsets"].wholes()
            if (places.size != 2) invalid(file, "a tensor is not where it should be")
            Triple(places[0], places[1], name to entry)
        }
        for ((start, stop, each) in entries.sortedWith(compareBy({ it.first }, { it.second }))) {
            if (start != end || stop !in start..data.capacity()) invalid(file, "a tensor is not where it should be")
            val (name, entry) = each
            val part = data.part(start.toInt(), (stop - start).toInt())
            val tensor = tensorOf(SAFE[entry["dtype"].text()], entry["shape"].wholes(), part)
                ?: invalid(file, "a tensor has another size or type than is known")
            tensors[name] = if (tensor.type.floating) tensor else widened(tensor)
            end = stop
        }
        if (end != data.capacity().toLong()) invalid(file, "it is longer than its tensors")
        tensors
    }
}

private fun widened(half: Tensor): Tensor {
    val result = zeros(Type.FLOAT, half.shape)
    for (i in 0 until half.count.toInt()) result.data.putInt(4 * i, half.data.getShort(2 * i).toInt() shl 16)
    return result
}

/** What a configuration of PEFT says of the tensors. */
private data class Kind(val name: String, val rank: Long, val factor: Double)

private fun kindOf(file: File, text: ByteArray) = readPeft(file, text) { json ->
    SETTINGS.find { json[it].value !in PLAIN }?.let {
        fail("peft-unsupported", "The adapter has a setting $it.", where = file.path)
    }
    val start = json["init_lora_weights"].value
    if (start !in STARTS) {
        fail("peft-unsupported", "init_lora_weights='$start' changes the base weights.", where = file.path)
    }
    val name = json["peft_type"].text()
    if (name != "LORA") return@readPeft Kind(name, 0, 1.0)
    val rank = json["r"].within(1L..Int.MAX_VALUE)
    val by = if (json["use_rslora"].flag(false)) Math.sqrt(rank.toDouble()) else rank.toDouble()
    val dora = if (json["use_dora"].flag(false)) " with DoRA" else ""
    Kind(name + dora, rank, json["lora_alpha"].number() / by)
}

private fun configText(file: File) = mapPeft(file).run { take(minOf(MOST_CONFIG, remaining().toLong())) }

/** Check that a configuration means what the package's does. */
private fun checkConfig(file: File, own: String) {
    val theirs = kindOf(file, configText(file))
    val mine = kindOf(file, own.toByteArray())
    val most = maxOf(Math.abs(mine.factor), Math.abs(theirs.factor))
    val near = Math.abs(mine.factor - theirs.factor) <= 1e-6 * most
    if (near && mine.copy(factor = theirs.factor) == theirs) return
    val (said, wanted) = listOf(theirs, mine).map { (name, rank, factor) ->
        "$name, rank $rank, factor ${repr(factor)}"
    }
    mismatch("the adapter is $said, the package's $wanted", file)
}
