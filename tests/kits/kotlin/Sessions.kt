import ai.onnxruntime.OnnxTensor
import java.io.File
import java.util.concurrent.atomic.AtomicInteger
import kotlin.concurrent.thread
import kotlin.random.Random
import org.odtpack.Json
import org.odtpack.OdtpackException
import org.odtpack.OnNotFinite
import org.odtpack.OrtCheckpointState
import org.odtpack.OrtTrainingSession
import org.odtpack.TrainingPackage

/** Text of a call's result for JSON: a number, the code of an error, or null. */
private fun outcome(call: () -> Any?): String = try {
    val found = call()
    if (found is Number) "\"$found\"" else "null"
} catch (error: OdtpackException) {
    "\"${error.errorCode}\""
} catch (error: Throwable) {
    "\"foreign:$error\""
}

/** Make calls of a session one by one; print a JSON list of what they gave, and the session. */
internal fun actions(json: Json) {
    val task = Task(json)
    val session = task.session
    session.onNotFinite = OnNotFinite.valueOf(json["policy"].text("skip").uppercase())
    val found = json["actions"].list().map { each -> outcome { act(task, each) } }
    val last = session.lastNotFinite?.let {
        "{\"code\": \"${it.errorCode}\", \"step\": ${it.step}, \"parameters\": " +
            "[${it.parameters.joinToString { name -> "\"$name\"" }}]}"
    }
    println(
        "{\"results\": $found, \"skipped\": ${session.skippedSteps}, \"last\": $last, " +
            "\"step\": ${session.stepCount}, \"rate\": \"${session.learningRate}\"}",
    )
}

private fun closed(tensor: OnnxTensor) = tensor.apply { if (!isClosed) close() }

private fun act(task: Task, json: Json): Any? {
    val session = if (json["on"].absent) task.session else task.second
    val batch = task.batches[json["batch"].whole(0).toInt()]
    return when (val name = json["do"].text()) {
        "batch" -> session.trainBatch(batch)
        "step" -> session.stepOn(batch).use(session::lossOf)
        "train" -> session.trainStep(batch).use(session::lossOf)
        "eval" -> session.evalStep(batch).use(session::lossOf)
        "null", "evaluate null" -> { // as Java may pass it
            val given = (batch - batch.keys.first()) + (batch.keys.first() to null)
            @Suppress("UNCHECKED_CAST")
            (given as Map<String, OnnxTensor>).let {
                if (name == "null") session.trainBatch(it) else session.evaluate(listOf(it).iterator())
            }
        }
        "evaluate none" -> session.evaluate(emptyList<Map<String, OnnxTensor>>().iterator()).loss
        "carry" -> OrtCheckpointState.loadCheckpoint(task.pack.path("checkpoint")).let {
            OrtCheckpointState.carryOver(it, session.checkpoint)
            null
        }
        "restore" -> {
            session.addProperty("odtpack.schedule", json["text"].text())
            if (session.restoreSchedule()) session.learningRate else null
        }
        "evaluate all" -> session.evaluate(task.batches.iterator()).loss
        "closed input" -> session.trainBatch(batch.mapValues { (_, each) -> closed(each) })
        "closed value" -> batch.values.first().let {
            session.checkpoint.updateParameter("weight", closed(it))
        }
        "pin gradient" -> {
            val mine = mapOf("weight_grad.accumulation.out" to batch.values.first())
            session.trainStep(batch, mine).close()
        }
        "pin closed" -> {
            val mine = mapOf("loss" to closed(task.batches[1].values.first()))
            session.trainStep(batch, mine).close()
        }
        "unpack" -> {
            val (from, missing) = Pair(File(json["from"].text()), json["missing"].text(""))
            TrainingPackage.unpack(json["path"].text(), {
                if (it == missing) throw java.io.IOException("it is not there")
                File(from, it).inputStream()
            })
        }
        "evaluate" -> session.evaluate(listOf(batch).iterator()).loss
        "fit" -> session.fit(listOf(batch).iterator()) { true }
        "optimizer" -> session.optimizerStep()
        "reset" -> session.lazyResetGrad()
        "scheduler" -> session.schedulerStep()
        "rate" -> session.learningRate = json["rate"].text().toFloat()
        "linear" -> session.registerLinearLRScheduler(
            json["warmup"].whole(), json["total"].number().toLong(), json["rate"].text().toFloat(),
        )
        "save" -> session.saveCheckpoint(json["path"].text(), true, json["keep"].flag(false))
        "interrupt" -> Thread.currentThread().interrupt()
        "interrupted" -> if (Thread.interrupted()) 1 else 0
        "interrupted saves" -> {
            val own = Thread.currentThread()
            val other = thread {
                repeat(60) {
                    Thread.sleep(it % 5L)
                    own.interrupt()
                }
            }
            while (other.isAlive) session.saveCheckpoint(json["path"].text(), true, true)
        }
        "load" -> OrtCheckpointState.loadCheckpoint(json["path"].text()).recovered
        "state" -> session.checkpoint.saveCheckpoint(json["path"].text(), true)
        "save adapter" -> session.checkpoint.saveAdapter(task.pack, json["path"].text())
        "load adapter" -> session.checkpoint.loadAdapter(task.pack, json["path"].text())
        "export" -> session.exportModelForInference(json["path"].text(), arrayOf("output"))
        "predict" -> session.inferenceSession("output").close()
        "read" -> session.toBuffer(true).remaining()
        "write" -> session.fromBuffer(session.toBuffer(true), true)
        "property" -> session.addProperty(json["name"].text("name"), 1L)
        "ask" -> session.trainStep(batch, setOf(json["name"].text())).close()
        "lose" -> File(task.pack.path(json["name"].text())).delete()
        "ask evaluation" -> session.evalStep(batch, setOf(json["name"].text())).close()
        "accuracy" -> session.evaluate(listOf(batch).iterator()).accuracy
        "create" -> create(task, json).use { it.trainBatch(batch) }
        "close" -> session.close()
        else -> throw IllegalArgumentException(name)
    }
}

/** The last of some sessions, of packages one after the other on one state, which may refuse them. */
private fun create(task: Task, json: Json): OrtTrainingSession {
    val state = if (json["checkpoint"].absent) task.session.checkpoint
    else OrtCheckpointState.loadCheckpoint(json["checkpoint"].text())
    val optimizer = json["optimizer"].text("")
    return json["packages"].list().map { each ->
        val pack = TrainingPackage.open(each.text())
        runCatching {
            OrtTrainingSession.create(
                env, pack, state, pack.path("training_model"), pack.path("eval_model"),
                optimizer.ifEmpty { pack.path("optimizer_model") }, pack.sessionOptions(1),
            )
        }
    }.last().getOrThrow()
}

/** What a session's state is as a file. */
private fun saved(session: OrtTrainingSession): List<Byte> {
    val file = File.createTempFile("state", ".ckpt")
    try {
        session.checkpoint.saveCheckpoint(file.path, true)
        return file.readBytes().asList()
    } finally {
        file.delete()
    }
}

/** The state after [steps] steps in one thread. */
private fun alone(json: Json, steps: Int) = Task(json).run {
    for (step in 1..steps) session.trainBatch(batches[0])
    saved(session).also { session.close() }
}

/** Make steps until one is refused for good; add each refusal to [codes]. */
private fun train(task: Task, steps: AtomicInteger, codes: MutableSet<String>, goesOn: () -> Boolean) {
    while (goesOn()) {
        val found = outcome { task.session.trainBatch(task.batches[0]) }.trim('"')
        if (found.toDoubleOrNull() != null) steps.incrementAndGet()
        else synchronized(codes) { codes.add(found) }
        if (found.toDoubleOrNull() == null && found != "busy") return
    }
}

private const val PATIENCE = 60_000_000_000 // nanoseconds, for two threads to meet

/** Close a session in the middle of a step, or make steps in two threads at once. */
private fun race(json: Json, random: Random, closes: Boolean): String {
    val task = Task(json)
    val steps = AtomicInteger()
    val codes = java.util.TreeSet<String>()
    val until = System.nanoTime() + random.nextLong(20_000_000, 120_000_000)
    val met = { synchronized(codes) { codes.isNotEmpty() } || System.nanoTime() > until + PATIENCE }
    val work = List(if (closes) 1 else 2) {
        thread { train(task, steps, codes) { closes || System.nanoTime() < until || !met() } }
    }
    if (closes) {
        // Not before the first step is made, which a machine that is busy may do late.
        while (System.nanoTime() < until || steps.get() == 0 && !met()) Thread.sleep(1)
        task.session.close()
        task.session.close()
    }
    work.forEach(Thread::join)
    val same = saved(task.session) == alone(json, steps.get()) && steps.get() > 0
    task.session.close()
    return "${codes.joinToString(",")} $same"
}

/** A batch with a NaN after some steps, and all of it again with the policy to stop. */
private fun notFinite(json: Json, random: Random): String {
    val task = Task(json)
    val session = task.session
    repeat(random.nextInt(6)) { session.trainBatch(task.batches[0]) }
    val before = saved(session)
    val step = { // not the one that would use the gradients of the steps before
        val bad = task.batches[2]
        val result = if (session.accumulationSteps == 1L) session.stepOn(bad) else session.trainStep(bad)
        result.use(session::lossOf)
    }
    val found = outcome(step)
    session.onNotFinite = OnNotFinite.STOP
    val stopped = outcome(step)
    val same = saved(session) == before && session.skippedSteps == 2L
    session.close()
    return "${found.trim('"')},${stopped.trim('"')} $same"
}

/** Each call of a session that is closed, after some steps. */
private fun afterClose(json: Json, random: Random): String {
    val task = Task(json)
    repeat(random.nextInt(6)) { task.session.trainBatch(task.batches[0]) }
    val before = saved(task.session)
    task.session.close()
    val calls = json["calls"].list().map { it.text() }
    val found = calls.map { name ->
        val call = Json(
            mapOf("do" to name, "path" to "/never", "rate" to "0.1", "warmup" to 1.0, "total" to 2.0),
        )
        outcome { act(task, call) }.trim('"')
    }
    task.session.close()
    return "${found.toSortedSet().joinToString(",")} ${saved(task.session) == before}"
}

/**
 * What an app may do with a session, again and again: each time with another one, after steps and
 * at moments that chance chooses. Prints a line of error codes each time, and whether the state is
 * what it should be, to the bit.
 */
internal fun race(kind: String, count: Int, json: Json) {
    val random = Random(7)
    repeat(count) {
        println(
            when (kind) {
                "close" -> race(json, random, true)
                "busy" -> race(json, random, false)
                "nan" -> notFinite(json, random)
                "closed" -> afterClose(json, random)
                else -> throw IllegalArgumentException(kind)
            },
        )
    }
}
