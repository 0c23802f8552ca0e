import ai.onnxruntime.OrtException
import java.io.File
import java.util.concurrent.atomic.AtomicInteger
import kotlin.concurrent.thread
import kotlin.random.Random
import org.odtpack.Json
import org.odtpack.OdtpackException
import org.odtpack.OnNotFinite
import org.odtpack.OrtTrainingSession

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

private fun act(task: Task, json: Json): Any? {
    val session = task.session
    val batch = task.batches[json["batch"].whole(0).toInt()]
    return when (val name = json["do"].text()) {
        "batch" -> session.trainBatch(batch)
        "step" -> session.stepOn(batch).use(session::lossOf)
        "train" -> session.trainStep(batch).use(session::lossOf)
        "eval" -> session.evalStep(batch).use(session::lossOf)
        "evaluate" -> session.evaluate(listOf(batch).iterator()).loss
        "fit" -> session.fit(listOf(batch).iterator()) { true }
        "optimizer" -> session.optimizerStep()
        "reset" -> session.lazyResetGrad()
        "scheduler" -> session.schedulerStep()
        "rate" -> session.learningRate = json["rate"].text().toFloat()
        "linear" -> session.registerLinearLRScheduler(
            json["warmup"].whole(), json["total"].whole(), json["rate"].text().toFloat(),
        )
        "save" -> session.saveCheckpoint(json["path"].text(), true, json["keep"].flag(false))
        "state" -> session.checkpoint.saveCheckpoint(json["path"].text(), true)
        "export" -> session.exportModelForInference(json["path"].text(), arrayOf("output"))
        "predict" -> session.inferenceSession("output").close()
        "read" -> session.toBuffer(true).remaining()
        "write" -> session.fromBuffer(session.toBuffer(true), true)
        "property" -> session.addProperty("name", 1L)
        "close" -> session.close()
        else -> throw IllegalArgumentException(name)
    }
}

/** The session that made [steps] steps in one thread. */
private fun alone(json: Json, steps: Int, path: String) = Task(json).run {
    for (step in 1..steps) session.trainBatch(batches[0])
    session.saveCheckpoint(path, true)
    session.close()
}

/**
 * Close a session from another thread in the middle of a step, or make steps in two threads at once;
 * again and again. Prints a line of error codes each time, and whether the state is that of the same
 * number of steps in one thread.
 */
internal fun race(kind: String, count: Int, json: Json) {
    val random = Random(7)
    val saved = File.createTempFile("race", ".ckpt")
    val wanted = File.createTempFile("race", ".wanted")
    repeat(count) {
        val task = Task(json)
        val session = task.session
        val steps = AtomicInteger()
        val codes = java.util.TreeSet<String>()
        val until = System.nanoTime() + random.nextLong(20_000_000, 120_000_000)
        val work = List(if (kind == "close") 1 else 2) {
            thread {
                while (kind == "close" || System.nanoTime() < until) {
                    try {
                        session.trainBatch(task.batches[0])
                        steps.incrementAndGet()
                    } catch (error: OdtpackException) {
                        synchronized(codes) { codes.add(error.errorCode) }
                        if (error.errorCode != "busy") break
                    } catch (error: OrtException) {
                        synchronized(codes) { codes.add("foreign:$error") }
                        break
                    } catch (error: RuntimeException) {
                        synchronized(codes) { codes.add("foreign:$error") }
                        break
                    }
                }
            }
        }
        if (kind == "close") {
            while (System.nanoTime() < until) Thread.sleep(1)
            session.close()
            session.close()
        }
        work.forEach(Thread::join)
        session.checkpoint.saveCheckpoint(saved.path, true)
        alone(json, steps.get(), wanted.path)
        val same = saved.readBytes().contentEquals(wanted.readBytes()) && steps.get() > 0
        println("${codes.joinToString(",")} $same")
        session.close()
    }
    saved.delete()
    wanted.delete()
}
