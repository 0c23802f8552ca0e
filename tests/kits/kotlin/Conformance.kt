import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtSession.Result
import java.io.File
import kotlin.math.abs
import kotlin.math.floor
import org.odtpack.Json
import org.odtpack.OdtpackException
import org.odtpack.OrtCheckpointState
import org.odtpack.State
import org.odtpack.Tensor
import org.odtpack.TrainingPackage
import org.odtpack.readCheckpoint
import org.odtpack.selfCheck

private class Failure(what: String) : Exception(what)

private fun must(good: Boolean, what: () -> String) {
    if (!good) throw Failure(what())
}

private var tolerant = false
private var threads = 0

private class Comparison(val exact: Boolean, val tolerance: Double) {
    fun loss(found: Double, wanted: Double, what: String) {
        val same = if (exact) found == wanted
        else abs(found - wanted) <= tolerance * maxOf(1.0, abs(wanted))
        must(same) { "$what is $found and should be $wanted" }
    }

    fun same(found: Tensor, wanted: Tensor, what: String) {
        must(found.type == wanted.type && found.shape.contentEquals(wanted.shape)) {
            "$what is ${found.description} and not ${wanted.description}"
        }
        if (found.bytes() == wanted.bytes()) return
        must(!exact && found.type.floating) { "$what differs" }
        val all = 0 until found.count.toInt()
        val largest = maxOf(all.maxOf { abs(wanted.real(it)) }, 1.0)
        val worst = all.maxOf { abs(wanted.real(it) - found.real(it)) }
        must(worst <= tolerance * largest) { "$what differs by $worst" }
    }

    fun same(found: State, wanted: State) {
        must(found.parameters.keys == wanted.parameters.keys) { "other parameters" }
        for ((name, parameter) in wanted.parameters) {
            val own = found.parameters.getValue(name)
            must(own.trainable == parameter.trainable) { "$name is trainable in one of them" }
            same(own.value, parameter.value, "'$name'")
        }
        must(found.properties == wanted.properties) { "${found.properties} ${wanted.properties}" }
        val (one, two) = Pair(found.optimizer, wanted.optimizer)
        must((one == null) == (two == null)) { "one has no optimizer state" }
        if (one == null || two == null) return
        must(one.step == two.step && one.rate == two.rate && one.kind == two.kind) {
            "the optimizer stands at ${one.step}, ${one.rate}, ${one.kind}"
        }
        must(one.groups == two.groups) { "${one.groups} is not ${two.groups}" }
        must(one.moments.keys.toList() == two.moments.keys.toList()) { "the order of the moments" }
        for ((name, moments) in two.moments) {
            must(one.moments.getValue(name).size == moments.size) { "other moments" }
            for ((found, right) in one.moments.getValue(name).zip(moments)) {
                same(found, right, "a moment of '$name'")
            }
        }
    }

    /** Results by name: the additional outputs of a step, or those of a predictor. */
    fun outputs(result: Result, wanted: Json, folder: File) {
        for (each in wanted.orEmpty()) {
            val name = each["name"].text()
            val value = result.get(name).get() as OnnxTensor
            val right = tensorOf(each, folder)
            val output = Tensor(right.type, value.info.shape, value.byteBuffer)
            same(output.copy(), right, "output $name")
        }
    }
}

private fun comparison(test: Json) =
    Comparison(test["exact"].flag(true) && !tolerant, test["tolerance"].number(2e-6))

private fun steps(training: Training, test: Json, folder: File) {
    val session = training.session
    for ((number, step) in test["steps"].list().withIndex()) {
        val update = step["update"].flag(true)
        val rate = step["rate"]
        must(!update || rate.absent || session.learningRate == rate.number().toFloat()) {
            "step $number: the learning rate is ${session.learningRate}, not ${rate.value}"
        }
        val batch = batchOf(step["inputs"], folder)
        val whole = session.hasStepModel
        val bad = step["not_finite"]
        val (made, skipped) = Pair(session.stepCount, session.skippedSteps)
        (if (whole) session.stepOn(batch) else session.trainStep(batch)).use { result ->
            val loss = session.lossOf(result)
            if (bad.absent) comparison(test).loss(loss, step["loss"].number(), "loss $number")
            else must(!loss.isFinite()) { "loss $number is $loss" }
            must(session.skippedSteps - skipped == if (bad.absent) 0L else 1L) { "step $number" }
            comparison(test).outputs(result, step["outputs"], folder)
        }
        val code = session.lastNotFinite?.errorCode
        must(bad.absent || code == bad.text()) { "step $number has the code $code" }
        if (update && !whole) session.optimizerStep()
        val advanced = session.stepCount > made
        if (update && training.scheduled && advanced) session.schedulerStep()
        if (!whole && step["reset"].flag(true)) session.lazyResetGrad()
    }
}

private fun train(
    test: Json,
    folder: File,
    scratch: File,
) = Training(test, folder, threads).use { training ->
    val session = training.session
    must(session.hasStepModel == test["step_model"].flag(false)) {
        "the step model is used where there is none, or the other way round"
    }
    steps(training, test, folder)
    must(session.skippedSteps == test["skipped_steps"].whole(0)) {
        "${session.skippedSteps} steps were skipped"
    }
    if (!test["evaluation"].absent) {
        val batch = batchOf(test["evaluation"]["inputs"], folder)
        val loss = session.evalStep(batch).use(session::lossOf)
        comparison(test).loss(loss, test["evaluation"]["loss"].number(), "the evaluation's loss")
        val wanted = test["evaluation"]["accuracy"].let { if (it.absent) null else it.number() }
        val found = session.evaluate(listOf(batch).iterator()).accuracy
        must(!comparison(test).exact || found == wanted) { "the accuracy is $found" }
    }
    for ((name, value) in test["properties"].let { if (it.absent) emptyMap() else it.fields() }) {
        val number = value.value as? Double
        if (number == null) training.state.addProperty(name, value.text())
        else if (number == floor(number)) training.state.addProperty(name, number.toLong())
        else training.state.addProperty(name, number.toFloat())
    }
    if (!test["after"].absent) {
        val saved = scratch.resolve("saved.ckpt").path
        session.saveCheckpoint(saved, true)
        val wanted = readCheckpoint(folder.resolve(test["after"].text()).path)
        comparison(test).same(readCheckpoint(saved), wanted)
    }
    val exported = test["export"]
    if (!exported.absent) {
        val names = exported["outputs"].list().map { it["name"].text() }.toTypedArray()
        val file = scratch.resolve("model.onnx")
        session.exportModelForInference(file.path, names)
        val wanted = folder.resolve(exported["file"].text())
        val same = file.readBytes().contentEquals(wanted.readBytes())
        must(!comparison(test).exact || same) { "the exported model has other bytes" }
        session.inferenceSession(*names).use { predictor ->
            predictor.run(batchOf(exported["inputs"], folder)).use {
                Comparison(false, 1e-5).outputs(it, exported["outputs"], folder)
            }
        }
    }
}

private fun nominal(test: Json, folder: File) = Training(test, folder, threads).use { training ->
    val batch = batchOf(test["steps"].list()[0]["inputs"], folder)
    val code = codeOf { training.session.trainStep(batch) }
    must(code == "nominal-state") { "a step without values: $code" }
    training.session.fromBuffer(tensorOf(test["values"], folder).bytes(), false)
    steps(training, test, folder)
}

private fun recover(test: Json, folder: File, scratch: File) {
    val names = listOf(test["checkpoint"].text(), test["previous"].text())
    for (name in names) {
        scratch.resolve(name).delete()
        val file = folder.resolve(name)
        if (file.exists()) file.copyTo(scratch.resolve(name))
    }
    val (path, before) = names.map(scratch::resolve)
    val state = OrtCheckpointState.loadCheckpoint(path.path)
    val says = { words: String ->
        must(words in state.recovered.orEmpty()) { "it says ${state.recovered}" }
    }
    says("of optimizer step ${test["step"].whole()}:")
    if (!test["lost"].absent) says("${test["lost"].whole()} optimizer steps made since")
    Comparison(true, 0.0).same(state.state, readCheckpoint(before.path))
    // The first save stands in for the damaged file; only the next moves it on.
    val good = before.readBytes()
    state.saveCheckpoint(path.path, true, true)
    must(before.readBytes().contentEquals(good)) { "the save before is another one" }
    val first = path.readBytes()
    state.addProperty("again", 1L)
    state.saveCheckpoint(path.path, true, true)
    must(before.readBytes().contentEquals(first)) { "the save before was not kept" }
    must(OrtCheckpointState.loadCheckpoint(path.path).recovered == null) { "it is damaged" }
}

private fun codeOf(body: () -> Unit): String = try {
    body()
    "accepted"
} catch (error: OdtpackException) {
    must(error.message!!.length > 20) { "it says no more than ${error.message}" }
    error.errorCode
}

private fun refused(test: Json, folder: File): String {
    return codeOf { act(test, folder) }
}

private fun act(test: Json, folder: File) {
    when (val action = test["action"].text()) {
        "open" -> TrainingPackage.open(folder.resolve(test["package"].text()).path)
        "load_checkpoint" ->
            OrtCheckpointState.loadCheckpoint(folder.resolve(test["checkpoint"].text()).path)
        else -> Training(test, folder, threads).use { training ->
            if (action == "step") training.session.trainStep(batchOf(test["inputs"], folder))
            if (action == "export") {
                val outputs = test["outputs"].list().map { it.text() }.toTypedArray()
                val file = File.createTempFile("refused", ".onnx")
                training.session.exportModelForInference(file.path, outputs)
            }
        }
    }
}

/** Run the cases of a folder; print `passed NAME` or `FAILED NAME: why` for each. */
fun conformance(folder: File, within: Boolean) {
    tolerant = within
    val index = readJson(folder.resolve("index.json"))
    threads = index["threads"].whole(0).toInt()
    val scratch = File.createTempFile("odtpack", "").also { it.delete() }
    scratch.mkdirs()
    for (entry in index["cases"].list()) {
        val name = entry["name"].text()
        val own = folder.resolve(name)
        try {
            val test = readJson(own.resolve("case.json"))
            when (val kind = test["kind"].text()) {
                "train", "resume", "not_finite" -> train(test, own, scratch)
                "nominal" -> nominal(test, own)
                "recover" -> recover(test, own, scratch)
                "buffer" -> Training(test, own, threads).use { training ->
                    val found = training.session.toBuffer(false)
                    val wanted = tensorOf(test["values"], own)
                    must(found == wanted.bytes()) { "the buffer differs" }
                }
                "error", "self_check" -> {
                    val found = if (kind == "error") refused(test, own) else codeOf {
                        val pack = own.resolve(test["package"].text())
                        selfCheck(env, TrainingPackage.open(pack.path))
                    }
                    val wanted = test["code"].text("accepted")
                    must(found == wanted) { "the code is $found and not $wanted" }
                }
                else -> throw Failure("there is no kind $kind")
            }
            println("passed $name")
        } catch (error: Exception) {
            println("FAILED $name: $error")
            if (error !is Failure && error !is OdtpackException) error.printStackTrace()
        }
    }
    scratch.deleteRecursively()
}
