import ai.onnxruntime.OnnxTensor
import java.io.File
import java.lang.management.ManagementFactory
import java.nio.ByteOrder
import java.util.Base64
import org.odtpack.Draw
import org.odtpack.Ed25519
import org.odtpack.Generator
import org.odtpack.Json
import org.odtpack.OdtpackException
import org.odtpack.OrtCheckpointState
import org.odtpack.OrtTrainingSession
import org.odtpack.Save
import org.odtpack.Tensor
import org.odtpack.Tokens
import org.odtpack.TrainingPackage
import org.odtpack.Type
import org.odtpack.packedAtOnce
import org.odtpack.readCheckpoint
import org.odtpack.zeros

private val system =
    ManagementFactory.getOperatingSystemMXBean() as com.sun.management.OperatingSystemMXBean

/** Milliseconds of processor time of all threads. */
private fun processor() = system.processCpuTime / 1e6

/** Resident anonymous memory in bytes. */
private fun anonymous(): Long = File("/proc/self/smaps_rollup").readLines()
    .first { it.startsWith("Anonymous:") }.filter(Char::isDigit).toLong() * 1024

internal class Task(val json: Json) {
    val pack = TrainingPackage.open(json["package"].text()).apply {
        kernels = json["kernels"].text("").ifEmpty { null }
    }
    val session: OrtTrainingSession

    /** Of the same state. */
    val second by lazy { OrtTrainingSession.create(env, pack, session.checkpoint, 1) }
    val batches: List<Map<String, OnnxTensor>>

    init {
        val state = OrtCheckpointState.loadCheckpoint(
            json["checkpoint"].text("").ifEmpty { pack.path("checkpoint") },
        )
        session = OrtTrainingSession.create(env, pack, state, json["threads"].whole(1).toInt())
        if (!json["rate"].absent) session.learningRate = json["rate"].number().toFloat()
        batches = json["batches"].list(listOf(json["data"])).map { data ->
            data.fields().mapValues { (_, each) -> read(each).onnx(env) }
        }
    }

    private fun read(json: Json): Tensor {
        val shape = json["shape"].list().map { it.whole() }.toLongArray()
        val tensor = zeros(Type.of(json["dtype"].text()), shape)
        tensor.data.duplicate().put(File(json["file"].text()).readBytes())
        return tensor
    }

    /** A step, in the former calls from the step on that the task names. */
    fun step(index: Int): Double {
        val batch = batches[(index - 1) % batches.size]
        if (index <= json["whole_steps"].whole(1_000_000_000)) return session.trainBatch(batch)
        val loss = session.trainStep(batch).use(session::lossOf)
        session.optimizerStep()
        session.lazyResetGrad()
        return loss
    }
}

/**
 * Train as `python_training.py` does; print what it prints, the memory before ONNX Runtime is
 * loaded and that by tenths.
 */
internal fun train(json: Json) {
    val before = anonymous()
    val task = Task(json)
    val steps = json["steps"].whole().toInt()
    val losses = ArrayList<Double>(steps)
    val times = ArrayList<Double>(steps)
    val memory = ArrayList<Long>()
    for (step in 1..steps) {
        val before = processor()
        losses.add(task.step(step))
        times.add(processor() - before)
        if (step % maxOf(steps / 10, 1) == 0) {
            System.gc()
            memory.add(anonymous())
        }
    }
    val save = json["save"].text("")
    if (save.isNotEmpty()) task.session.saveCheckpoint(save, true)
    val evaluation = task.batches.filter { json["evaluate"].flag(false) }
        .map { task.session.evalStep(it).use(task.session::lossOf) }
    task.session.close()
    println(
        "{\"losses\": $losses, \"times\": $times, \"resident\": $memory, " +
            "\"before\": $before, \"evaluation\": $evaluation}",
    )
}

/** Print the error of an export for inference. */
fun export(folder: String, path: String) {
    OrtTrainingSession.create(env, TrainingPackage.open(folder)).use { session ->
        try {
            session.exportModelForInference(path, arrayOf("logits"))
        } catch (error: OdtpackException) {
            println("${error.errorCode}\n${error.message}")
        }
    }
}

/** Export a package with the parameters of a checkpoint; print 1. */
fun exports(folder: String, checkpoint: String, path: String) {
    val state = OrtCheckpointState.loadCheckpoint(checkpoint)
    OrtTrainingSession.create(env, TrainingPackage.open(folder), state).use {
        it.exportModelForInference(path, arrayOf("output"))
    }
    println(1)
}

/**
 * PACKAGE TRAINED ADAPTER... PROMPT: a line for each adapter, for the state and for no adapter:
 * tokens of a prompt such as 3,4,5, greedily, drawn, drawn of a few, and before the fourth; then the
 * logits of the first. ODTPACK_TEST_PACKED: a folder for packed weights, which are packed in parts.
 */
fun decoder(words: List<String>) {
    val prompt = words.last().split(",").map(String::toInt).toIntArray()
    val state = OrtCheckpointState.loadCheckpoint(words[1])
    val pack = TrainingPackage.open(words[0])
    val options = pack.sessionOptions(1)
    packedAtOnce = 16384
    System.getenv("ODTPACK_TEST_PACKED")?.let { options.addConfigEntry("odtpack.packed_weights", it) }
    Generator(env, pack, 1, options).use { generator ->
        val names = words.drop(2).dropLast(1)
        for (name in names) generator.addAdapter(name, name)
        for (name in listOf("state", "gone")) generator.addAdapter(name, state)
        generator.removeAdapter("gone")
        val other = OrtCheckpointState.loadCheckpoint(words[1])
        other.state.parameters.run { remove(entries.first { it.value.trainable }.key) }
        val refused = runCatching { generator.addAdapter("other", other) }.exceptionOrNull()
        check((refused as? OdtpackException)?.errorCode == "adapter-mismatch") { "$refused" }
        val all = { tokens: Tokens -> tokens.use { it.asSequence().toList() } }
        for (name in names + "state" + null) {
            val plain = all(generator.generate(prompt, name, 9))
            val drawn = generator.generate(prompt, name, 9, temperature = 1.5, topP = 0.95, seed = 7)
            val few = generator.generate(prompt, name, 9, temperature = 1.5, topK = 3, seed = 8)
            few.next().let { first -> // two sequences take turns
                val rest = all(drawn)
                println((plain + rest + first + all(few) +
                    all(generator.generate(prompt, name, 9, setOf(plain[3]))) +
                    generator.logits(prompt, name).toList()).joinToString(" "))
            }
        }
        for (begin in listOf(
            { generator.generate(prompt, "gone") }, { generator.generate(prompt, topP = 0.0) },
            { generator.generate(intArrayOf(-1)) }, { generator.generate(intArrayOf(3, 128)) },
        )) {
            try {
                all(begin())
            } catch (error: OdtpackException) {
                println(error.errorCode)
            }
        }
        val begun = generator.generate(prompt)
        begun.next()
        generator.close() // as `use` does again
        for (call in listOf({ begun.next() }, { generator.logits(prompt) })) {
            val error = runCatching { call() }.exceptionOrNull()
            check((error as? OdtpackException)?.errorCode == "closed") { "$error" }
        }
        begun.close()
    }
}

/** Print the token that is drawn of each: [logits, temperature, topK, topP, seed]. */
internal fun draws(json: Json) = println(
    json.list().map { each ->
        val (logits, temperature, topK, topP, seed) = each.list()
        val draw = Draw(temperature.number(), topK.whole().toInt(), topP.number(), seed.whole())
        draw(logits.list().map { it.text().toFloat() }.toFloatArray())
    },
)

/**
 * Save for ever: all elements of all parameters are the property `number`, which counts up. [before]
 * is `keep`, `replace`, or `swap`: keep, with the elements of even numbers inside.
 */
fun saves(path: String, externalAbove: Long, before: String) {
    val state = readCheckpoint(path)
    var number = state.properties["number"] as Long
    while (true) {
        number++
        for (parameter in state.parameters.values) {
            val all = FloatArray(parameter.value.count.toInt()).apply { fill(number.toFloat()) }
            parameter.value.bytes().order(ByteOrder.nativeOrder()).asFloatBuffer().put(all)
        }
        state.properties["number"] = number
        try {
            val above = if (before == "swap" && number % 2 == 0L) Long.MAX_VALUE else externalAbove
            val keeps = before != "replace"
            Save(path, state, true, keeps).write(above)
        } catch (error: OdtpackException) {
            System.err.println(error.errorCode)
            return
        }
        println(number)
    }
}

/** Print whether a checkpoint is checked, and what was lost if it is not the one that was meant. */
fun load(path: String) = refusing {
    val state = OrtCheckpointState.loadCheckpoint(path)
    println(if (state.isChecked) "checked" else "unchecked")
    println(state.recovered.orEmpty())
}

/** Save what a checkpoint holds over another, which is kept. */
fun keep(from: String, path: String, externalAbove: Long) = refusing {
    Save(path, readCheckpoint(from), true, true).write(externalAbove)
}

private fun refusing(work: () -> Unit) = try {
    work()
} catch (error: OdtpackException) {
    println("${error.errorCode}\n${error.message}")
}

/** Open every file and folder of a folder; print what came of it. */
fun damaged(folder: File) {
    for (path in folder.listFiles()!!.sorted()) {
        val found = try {
            if (path.isDirectory) {
                val pack = TrainingPackage.open(path.path)
                OrtTrainingSession.create(env, pack, threads = 1).close()
            } else OrtCheckpointState.loadCheckpoint(path.path)
            "loaded"
        } catch (error: OdtpackException) {
            error.errorCode
        } catch (error: Throwable) {
            "unclear: $error"
        }
        println("${path.name} $found")
    }
}

/** Open a package with each of some keys in Base64; print what came of it. */
fun signature(folder: String, keys: List<String>) {
    for (key in keys) {
        println(
            try {
                TrainingPackage.open(folder, Ed25519(Base64.getDecoder().decode(key)))
                "accepted"
            } catch (error: OdtpackException) {
                error.errorCode
            },
        )
    }
}
