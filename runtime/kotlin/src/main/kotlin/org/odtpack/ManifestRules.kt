package org.odtpack

import ai.onnxruntime.OrtSession.SessionOptions.OptLevel
import java.text.Normalizer
import java.util.Locale

internal const val MANIFEST = "manifest.json"
internal const val SIGNATURE = "manifest.sig"
internal const val SPINNING = "session.force_spinning_stop"

private const val MOST_ELEMENTS = 1L shl 40
private const val MOST_MADE_UP = 1L shl 26
private const val WHOLE_MAX = (1L shl 53) - 1
private const val CHECKED_STEPS = 5
private val NEEDED_FILES = listOf("training_model", "eval_model", "optimizer_model", "checkpoint")

/** Files that have a key of their own. */
internal val FILES = NEEDED_FILES +
    listOf("checkpoint_data", "step_model", "inference_template", "nominal_checkpoint")
internal val LEVELS = mapOf(
    "disabled" to OptLevel.NO_OPT, "basic" to OptLevel.BASIC_OPT,
    "extended" to OptLevel.EXTENDED_OPT, "all" to OptLevel.ALL_OPT,
)
private val DIGEST = Regex("[0-9a-f]{64}")
private val FLAGS = listOf("memory_pattern", "arena", "shared_allocator", "prepacking")
private val SIZES = listOf("initial_chunk_size_bytes", "max_dead_bytes_per_chunk")
private val SESSION = FLAGS + SIZES + listOf("optimization_level", "threads", "config")

/** Settings of schedules that are fractions. */
private val FRACTIONS = listOf("floor", "gamma")

/**
 * Check all that a session or an export reads of a manifest, before anything is made of it: types,
 * bounds, names. Keys that a kit does not know are passed over, but for those of `session`, where
 * ONNX Runtime would be told what they say.
 */
internal fun checkManifest(manifest: Json) {
    if (!manifest["session"].absent) checkSession(manifest["session"])
    checkFiles(manifest)
    val inputs = few(manifest["inputs"])
    val outputs = few(manifest["outputs"])
    val more = if ("evaluation_outputs" in manifest) few(manifest["evaluation_outputs"]) else emptyList()
    val parameters = manifest["parameters"].list()
    if (parameters.size > 100_000) Json.invalid("'parameters' are more than 100,000")
    for (each in inputs) {
        checkTensor(each, listOf("data", "labels", "target"), false)
        each["class_count"].let { if (!it.absent) it.within(1..Int.MAX_VALUE.toLong()) }
        each["ignore_index"].let { if (!it.absent) it.whole() }
    }
    for (each in outputs + more) {
        checkTensor(each, listOf("loss", "additional", "prediction"), false)
    }
    if (outputs.firstOrNull()?.get("role")?.text() != "loss") {
        Json.invalid("the first output must be the loss")
    }
    for (each in parameters) checkParameter(each)
    unique("inputs", inputs)
    unique("outputs", outputs + more)
    val known = unique("parameters", parameters)
    for (each in parameters) {
        val scale = each["scale"]
        if (!scale.absent && scale.text() !in known) Json.invalid("a scale must be a parameter")
    }
    val trainable = parameters.filter { it["role"].text() == "trainable" }
    if (!manifest["layout"].absent) checkLayout(manifest["layout"], trainable)
    if ("groups" in manifest) checkGroups(manifest["groups"].list(), trainable)
    if ("accumulation_steps" in manifest) manifest["accumulation_steps"].within(1L..(1L shl 20))
    if (!manifest["schedule"].absent) checkSchedule(manifest["schedule"])
    manifest["optimizer"]["kind"].name()
    if (!manifest["self_check"].absent) checkMadeUp(manifest["self_check"])
    val inference = manifest["inference"]
    if (inference.absent != manifest["files"]["inference_template"].absent) {
        Json.invalid("an inference template needs both its file and the key inference")
    }
    if (!inference.absent) {
        for (key in listOf("inputs", "outputs")) inference[key].list().forEach { it.name() }
        inference["parameters"].list().find { it.name() !in known }
            ?.let { Json.invalid("'inference' names a parameter that there is none of") }
    }
}

/** The options of sessions: nothing but what odtpack writes reaches ONNX Runtime. */
internal fun checkSession(session: Json) {
    session.fields().keys.find { it !in SESSION }?.let { Json.invalid("'session' has the key '$it'") }
    session["optimization_level"].oneOf(LEVELS.keys)
    for (key in FLAGS) if (key in session && session[key].absent) Json.invalid("'session.$key'")
    for (key in FLAGS) session[key].flag(true)
    for (key in SIZES) if (!session[key].absent) session[key].within(256L..(1L shl 30))
    if (!session["threads"].absent) session["threads"].within(1L..256L)
    if ("config" !in session) return
    for ((key, value) in session["config"].fields()) {
        if (key != SPINNING || value.text() != "1") {
            Json.invalid("'session.config' may have nothing but \"$SPINNING\": \"1\"")
        }
    }
}

/** The entries of all files, whose paths were checked: inside the package, and each of its own. */
internal fun listedFiles(manifest: Json): List<Json> {
    val known = manifest["files"]
    val files = FILES.map(known::get).filterNot { it.absent } +
        if ("extra" in known) known["extra"].list() else emptyList()
    val taken = hashSetOf(folded(MANIFEST), folded(SIGNATURE))
    for (each in files) {
        val path = each["path"].text()
        val problem = problemOf(path) ?: if (taken.add(folded(path))) null else
            "is on some systems the same as another one of the package"
        if (problem != null) {
            fail(
                "package-path", "The manifest names the file '${path.take(200)}', which $problem.",
                "", "build the package again",
            )
        }
    }
    return files
}

private fun checkFiles(manifest: Json) {
    val files = manifest["files"]
    for (key in NEEDED_FILES) {
        if (files[key].absent) Json.invalid("'files.$key' is missing")
    }
    for (each in listedFiles(manifest)) {
        each["size_bytes"].within(0..WHOLE_MAX)
        if (!DIGEST.matches(each["sha256"].text())) Json.invalid("a sha256 is not 64 hex digits")
    }
    val data = files["checkpoint_data"]
    if (!data.absent && data["path"].text() != files["checkpoint"]["path"].text() + ".data") {
        Json.invalid("checkpoint_data must be named after the checkpoint")
    }
}

private fun folded(path: String) = Normalizer.normalize(
    Normalizer.normalize(path, Normalizer.Form.NFC).uppercase(Locale.ROOT).lowercase(Locale.ROOT),
    Normalizer.Form.NFC,
)

private val DEVICE = Regex("(con|prn|aux|nul|com[0-9]|lpt[0-9])", RegexOption.IGNORE_CASE)
private val DIRECTIONS = ('\u202A'..'\u202E') + ('\u2066'..'\u2069') + listOf('\u200E', '\u200F')

/** What is wrong with the path of a package's file, on any system; null if nothing is. */
private fun problemOf(path: String): String? {
    val parts = path.split('/')
    return when {
        '\\' in path || ':' in path || parts.any { it.isEmpty() || it == "." || it == ".." } ->
            "does not lie inside the package"
        path.any { Character.isISOControl(it) || it in DIRECTIONS || it in "<>\"|?*" } ->
            "holds characters that not every system allows in a name"
        path.toByteArray().size > 1024 || parts.any { it.toByteArray().size > 255 } -> "is too long"
        parts.any {
            it.last() in " ." || it.first() == ' ' || DEVICE.matches(it.substringBefore('.').trimEnd())
        } -> "is a name that Windows reserves or changes"
        else -> null
    }
}

private fun few(list: Json): List<Json> =
    list.list().also { if (it.size > 1024) Json.invalid("a list has more than 1,024 entries") }

private fun unique(what: String, entries: List<Json>): Set<String> {
    val names = entries.map { it["name"].name() }.toHashSet()
    if (names.size != entries.size) Json.invalid("two $what have the same name")
    return names
}

private fun checkTensor(json: Json, roles: List<String>, fixed: Boolean) {
    json["name"].name()
    json["role"].oneOf(roles)
    Type.of(json["dtype"].text())
    val sizes = json["shape"].list()
    val known = sizes.all { it.value is Double }
    if (fixed && !known) Json.invalid("a shape must be fixed")
    checkSizes(
        sizes.filterNot { size -> size.absent || (size.value is String).also { if (it) size.name() } },
        sizes.size, MOST_ELEMENTS,
    )
}

/** Check a shape's rank, and the product of its sizes, of which a 0 makes no other harmless. */
private fun checkSizes(sizes: List<Json>, rank: Int, most: Long) {
    if (rank > 32) Json.invalid("a shape has more than 32 axes")
    var product = 1L
    for (size in sizes) {
        val length = maxOf(size.within(0..WHOLE_MAX), 1)
        if (length > most / product) Json.invalid("a shape has more than $most elements")
        product *= length
    }
}

private fun checkParameter(json: Json) {
    checkTensor(json, listOf("trainable", "frozen", "state"), true)
    json["model_dtype"].let { if (!it.absent) Type.of(it.text()) }
    json["scale"].let { if (!it.absent) it.name() }
    json["offset"].let { if (!it.absent) it.within(0..WHOLE_MAX) }
    val type = Type.of(json["dtype"].text())
    val bytes = json["size_bytes"]
    // Numpy has 8 bytes for a reference to a text.
    val each = if (type == Type.STRING) 8L else type.size.toLong()
    if (!bytes.absent && bytes.within(0..WHOLE_MAX) != elements(json) * each) {
        Json.invalid("size_bytes is not that of its shape and dtype")
    }
}

private fun elements(parameter: Json) =
    parameter["shape"].list().fold(1L) { product, size -> product * size.whole() }

private fun checkLayout(layout: Json, trainable: List<Json>) {
    val line = if (layout["dtype"].oneOf(listOf("float32", "float64")) == "float32") 16L else 8L
    layout["run"].oneOf(listOf("chunks", "whole", "parameters"))
    layout["chunk_elements"].within(1024L..(1L shl 30))
    layout["inputs"].list().forEach { it.name() }
    if ("state" in layout) {
        for (each in layout["state"].list()) {
            each["name"].name()
            val axes = each["axes"].list(emptyList())
            if (axes.size > 2 || axes.any { it.whole() !in 0..1 }) Json.invalid("the axes of a state")
        }
    }
    var end = 0L
    val places = trainable.map { Pair(it["offset"].whole(), elements(it)) }
    for ((offset, size) in places.sortedWith(compareBy({ it.first }, { it.second }))) {
        if (offset % line != 0L) Json.invalid("an offset is not a multiple of $line elements")
        if (offset < end) Json.invalid("two trainable parameters overlap")
        end = offset + size
    }
    if (layout["elements"].whole() != (end + line - 1) / line * line) {
        Json.invalid("'layout.elements' is not where the last trainable parameter ends")
    }
}

private fun checkGroups(groups: List<Json>, trainable: List<Json>) {
    for (group in groups) {
        checkRate(group["learning_rate_scale"])
        group["weight_decay"].number()
    }
    val names = groups.flatMap { it["parameters"].list() }.map { it.name() }
    if (names.isNotEmpty() && names.sorted() != trainable.map { it["name"].text() }.sorted()) {
        Json.invalid("the groups do not hold each trainable parameter once")
    }
}

/** A learning rate, or what one is multiplied by: above 0 and finite, also as float32. */
private fun checkRate(json: Json) {
    val rate = json.number().toFloat()
    if (!(rate > 0 && rate.isFinite())) Json.invalid("a rate must be a finite float32 above 0")
}

private fun checkSchedule(json: Json) {
    if (!json["learning_rate"].absent) checkRate(json["learning_rate"])
    val kind = json["kind"].text()
    val settings = if ("settings" in json) json["settings"] else Json(emptyMap<String, Any>())
    for ((key, value) in settings.fields()) {
        if (key in FRACTIONS) value.number()
        else if (key == "milestones") value.list().forEach { it.whole() }
        else value.within(0..WHOLE_MAX)
    }
    try {
        val warmup = settings["warmup_steps"].whole(0)
        Schedule.from(kind, settings, maxOf(warmup, 1))
    } catch (error: OdtpackException) {
        Json.invalid("'schedule' is out of range")
    }
}

private fun checkMadeUp(check: Json) {
    if (!check["reason"].absent) {
        check["reason"].name()
        return
    }
    val inputs = check["inputs"].list()
    for (input in inputs) {
        input["name"].name()
        val sizes = input["shape"].list()
        checkSizes(sizes, sizes.size, MOST_MADE_UP)
        if (!input["bound"].absent) input["bound"].within(1..WHOLE_MAX)
    }
    checkRate(check["learning_rate"])
    check["evaluation_loss"].number()
    val losses = check["losses"].list().onEach { it.number() }
    val tolerances = check["tolerances"].list().onEach { it.number() }
    if (inputs.isEmpty() || losses.size != CHECKED_STEPS || tolerances.size != CHECKED_STEPS + 1) {
        Json.invalid("'self_check' must hold a reason, or everything else")
    }
}
