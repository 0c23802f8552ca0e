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
internal val FILES = NEEDED_FILES + listOf("checkpoint_data", "step_model", "inference_template", "nominal_checkpoint")
internal val LEVELS = mapOf("disabled" to OptLevel.NO_OPT, "basic" to OptLevel.BASIC_OPT,
    "extended" to OptLevel.EXTENDED_OPT, "all" to OptLevel.ALL_OPT)
private val DIGEST = Regex("[0-9a-f]{64}")
private val FLAGS = listOf("memory_pattern", "arena", "shared_allocator", "prepacking")
private val SIZES = listOf("initial_chunk_size_bytes", "max_dead_bytes_per_chunk")
private val SESSION = FLAGS + SIZES + listOf("optimization_level", "threads", "config")
private val PARAMETER_ROLES = listOf("trainable", "frozen", "state")
private val INPUT_ROLES = listOf("data", "labels", "target")
private val OUTPUT_ROLES = listOf("loss", "additional", "prediction")

/** Settings of schedules that are fractions. */
private val FRACTIONS = listOf("floor", "gamma")

/** A parameter, or a user's input or output, as the manifest describes it. */
internal class Spec(json: Json, roles: List<String>) {
    val name = json["name"].name()
    val role = json["role"].oneOf(roles)
    val type = Type.of(json["dtype"].text())
    private val sizes = json["shape"].list()

    /** The names of sizes that may vary; empty for the others. */
    val symbols = sizes.map { it.value as? String ?: "" }

    /** -1 for what may vary. */
    val shape = LongArray(sizes.size) { axis ->
        val size = sizes[axis]
        if (size.absent) -1 else if (size.value is String) -1L.also { size.name() } else size.within(0..WHOLE_MAX)
    }
    val classCount: Long
    val ignored: Long?
    val modelType: Type?
    val scale: String
    val offset: Long
    val trainable get() = role == "trainable"

    init {
        checkSizes(shape, MOST_ELEMENTS)
        val ofInput = json.takeIf { roles === INPUT_ROLES } ?: Json.NOTHING
        classCount = ofInput["class_count"].given?.within(1..Int.MAX_VALUE.toLong()) ?: 0
        ignored = ofInput["ignore_index"].given?.whole()
        val ofParameter = json.takeIf { roles === PARAMETER_ROLES } ?: Json.NOTHING
        if (roles === PARAMETER_ROLES && shape.any { it < 0 }) Json.invalid("a shape must be fixed")
        modelType = ofParameter["model_dtype"].given?.let { Type.of(it.text()) }
        scale = ofParameter["scale"].given?.name().orEmpty()
        offset = ofParameter["offset"].given?.within(0..WHOLE_MAX) ?: -1
        val bytes = ofParameter["size_bytes"].given?.within(0..WHOLE_MAX)
        // Numpy has 8 bytes for a reference to a text.
        if (bytes != null && bytes != shape.count * if (type == Type.STRING) 8 else type.size) {
            Json.invalid("size_bytes is not that of its shape and dtype")
        }
    }

    val description get() = type.label + shape.indices.map { axis ->
        if (shape[axis] >= 0) shape[axis] else symbols[axis].ifEmpty { "?" }
    }
}

/**
 * A manifest. All that a session or an export reads of it is checked before anything is made of it:
 * types, bounds, names. Keys that a kit does not know are passed over, but for those of `session`,
 * where ONNX Runtime would be told what they say.
 */
internal class Manifest(private val json: Json) {
    /** The entries of all files, whose paths were checked. */
    val files: List<Json>
    val inputs: List<Spec>
    val outputs: List<Spec>

    /** Those of the evaluation model: the same and, after them, what it alone returns. */
    val evaluationOutputs: List<Spec>
    val parameters: List<Spec>
    val trainable get() = parameters.filter { it.trainable }

    operator fun get(key: String) = json[key]

    init {
        json["session"].given?.let(::checkSession)
        files = checkFiles()
        inputs = specs("inputs", INPUT_ROLES)
        outputs = specs("outputs", OUTPUT_ROLES)
        val more = if ("evaluation_outputs" in json) specs("evaluation_outputs", OUTPUT_ROLES) else emptyList()
        evaluationOutputs = outputs + more
        parameters = specs("parameters", PARAMETER_ROLES, 100_000)
        if (outputs.firstOrNull()?.role != "loss") Json.invalid("the first output must be the loss")
        unique("inputs", inputs)
        unique("outputs", evaluationOutputs)
        val known = unique("parameters", parameters)
        if (parameters.any { it.scale.isNotEmpty() && it.scale !in known }) Json.invalid("a scale must be a parameter")
        json["layout"].given?.let(::checkLayout)
        if ("groups" in json) checkGroups(json["groups"].list())
        if ("accumulation_steps" in json) json["accumulation_steps"].within(1L..(1L shl 20))
        json["schedule"].given?.let(::checkSchedule)
        json["optimizer"]["kind"].name()
        json["self_check"].given?.let(::checkMadeUp)
        val inference = json["inference"]
        if (inference.absent != json["files"]["inference_template"].absent) {
            Json.invalid("an inference template needs both its file and the key inference")
        }
        if (!inference.absent) {
            for (key in listOf("inputs", "outputs")) inference[key].list().forEach { it.name() }
            inference["parameters"].list().find { it.name() !in known }
                ?.let { Json.invalid("'inference' names a parameter that there is none of") }
        }
    }

    private fun specs(key: String, roles: List<String>, most: Int = 1024): List<Spec> {
        val list = json[key].list()
        if (list.size > most) Json.invalid("'$key' are more than $most")
        return list.map { Spec(it, roles) }
    }

    private fun unique(what: String, specs: List<Spec>): Set<String> {
        val names = specs.map { it.name }.toHashSet()
        if (names.size != specs.size) Json.invalid("two $what have the same name")
        return names
    }

    private fun checkFiles(): List<Json> {
        val known = json["files"]
        NEEDED_FILES.find { known[it].absent }?.let { Json.invalid("'files.$it' is missing") }
        val listed = listedFiles(json)
        for (each in listed) {
            each["size_bytes"].within(0..WHOLE_MAX)
            if (!DIGEST.matches(each["sha256"].text())) Json.invalid("a sha256 is not 64 hex digits")
        }
        val data = known["checkpoint_data"].given
        if (data != null && data["path"].text() != known["checkpoint"]["path"].text() + ".data") {
            Json.invalid("checkpoint_data must be named after the checkpoint")
        }
        return listed
    }

    private fun checkLayout(layout: Json) {
        val line = if (layout["dtype"].oneOf(listOf("float32", "float64")) == "float32") 16L else 8L
        layout["run"].oneOf(listOf("chunks", "whole", "parameters"))
        layout["chunk_elements"].within(1024L..(1L shl 30))
        layout["inputs"].list().forEach { it.name() }
        for (each in if ("state" in layout) layout["state"].list() else emptyList()) {
            each["name"].name()
            val axes = each["axes"].given?.wholes() ?: LongArray(0)
            if (axes.size > 2 || axes.any { it !in 0..1 }) Json.invalid("the axes of a state")
        }
        var end = 0L
        for (spec in trainable.sortedWith(compareBy({ it.offset }, { it.shape.count }))) {
            if (spec.offset < 0) Json.invalid("an offset is missing")
            if (spec.offset % line != 0L) Json.invalid("an offset is not a multiple of $line elements")
            if (spec.offset < end) Json.invalid("two trainable parameters overlap")
            end = spec.offset + spec.shape.count
        }
        if (layout["elements"].whole() != (end + line - 1) / line * line) {
            Json.invalid("'layout.elements' is not where the last trainable parameter ends")
        }
    }

    private fun checkGroups(groups: List<Json>) {
        for (group in groups) {
            checkRate(group["learning_rate_scale"])
            group["weight_decay"].number()
        }
        val names = groups.flatMap { it["parameters"].list() }.map { it.name() }
        if (names.isNotEmpty() && names.sorted() != trainable.map { it.name }.sorted()) {
            Json.invalid("the groups do not hold each trainable parameter once")
        }
    }
}

/** The options of sessions: nothing but what odtpack writes reaches ONNX Runtime. */
private fun checkSession(session: Json) {
    session.fields().keys.find { it !in SESSION }?.let { Json.invalid("'session' has the key '$it'") }
    session["optimization_level"].oneOf(LEVELS.keys)
    for (key in FLAGS) if (key in session) session[key].given?.flag(true) ?: Json.invalid("'session.$key'")
    for (key in SIZES) session[key].given?.within(256L..(1L shl 30))
    session["threads"].given?.within(1L..256L)
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
    val files = FILES.mapNotNull { known[it].given } + if ("extra" in known) known["extra"].list() else emptyList()
    val taken = hashSetOf(folded(MANIFEST), folded(SIGNATURE))
    for (each in files) {
        val path = each["path"].text()
        val problem = problemOf(path) ?: if (taken.add(folded(path))) continue else
            "is on some systems the same as another one of the package"
        fail("package-path", "The manifest names the file '${path.take(200)}', which $problem.",
            "build the package again")
    }
    return files
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

/** Check a shape's rank, and the product of its sizes, of which a 0 makes no other harmless; -1 varies. */
private fun checkSizes(sizes: LongArray, most: Long) {
    if (sizes.size > 32) Json.invalid("a shape has more than 32 axes")
    sizes.fold(1L) { product, size ->
        val length = maxOf(size, 1)
        if (length > most / product) Json.invalid("a shape has more than $most elements")
        product * length
    }
}

/** A learning rate, or what one is multiplied by: above 0 and finite, also as float32. */
private fun checkRate(json: Json) {
    val rate = json.number().toFloat()
    if (!(rate > 0 && rate.isFinite())) Json.invalid("a rate must be a finite float32 above 0")
}

private fun checkSchedule(json: Json) {
    json["learning_rate"].given?.let(::checkRate)
    val kind = json["kind"].text()
    val settings = if ("settings" in json) json["settings"] else Json.NOTHING
    for ((key, value) in settings.fields()) {
        if (key in FRACTIONS) value.number()
        else if (key == "milestones") value.wholes()
        else value.within(0..WHOLE_MAX)
    }
    try {
        Schedule.from(kind, settings, maxOf(settings["warmup_steps"].whole(0), 1))
    } catch (error: OdtpackException) {
        Json.invalid("'schedule' is out of range")
    }
}

private fun checkMadeUp(check: Json) {
    check["reason"].given?.run {
        name()
        return
    }
    val inputs = check["inputs"].list()
    for (input in inputs) {
        input["name"].name()
        checkSizes(input["shape"].list().map { it.within(0..WHOLE_MAX) }.toLongArray(), MOST_MADE_UP)
        input["bound"].given?.within(1..WHOLE_MAX)
    }
    checkRate(check["learning_rate"])
    check["evaluation_loss"].number()
    val losses = check["losses"].list().onEach { it.number() }
    val tolerances = check["tolerances"].list().onEach { it.number() }
    if (inputs.isEmpty() || losses.size != CHECKED_STEPS || tolerances.size != CHECKED_STEPS + 1) {
        Json.invalid("'self_check' must hold a reason, or everything else")
    }
}
