import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtLoggingLevel
import java.io.File
import java.io.RandomAccessFile
import org.odtpack.Json
import org.odtpack.OrtCheckpointState
import org.odtpack.OrtTrainingSession
import org.odtpack.Schedule
import org.odtpack.Tensor
import org.odtpack.TrainingPackage
import org.odtpack.Type
import org.odtpack.benchmark
import org.odtpack.zeros

/** What the tests' programs share: jobs in JSON, with tensors in raw files. */
val env: OrtEnvironment by lazy {
    OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL)
}

internal fun readJson(file: File) = Json.read(file.readBytes())

internal fun Json.orEmpty() = if (absent) emptyList() else list()

internal fun tensorOf(json: Json, folder: File): Tensor {
    val shape = json["shape"].list().map { it.whole() }.toLongArray()
    val tensor = zeros(Type.of(json["dtype"].text()), shape)
    RandomAccessFile(folder.resolve(json["file"].text()), "r").use {
        val bytes = ByteArray(tensor.data.capacity())
        it.seek(json["offset"].whole(0))
        it.readFully(bytes)
        tensor.data.duplicate().put(bytes)
    }
    return tensor
}

internal fun batchOf(inputs: Json, folder: File): Map<String, OnnxTensor> =
    inputs.list().associate { it["name"].text() to tensorOf(it, folder).onnx(env) }

/** The training that a case or a task describes. */
internal class Training(json: Json, folder: File, threads: Int) : AutoCloseable {
    val pack = TrainingPackage.open(folder.resolve(json["package"].text()).path)
    val state = OrtCheckpointState.loadCheckpoint(
        if (json["checkpoint"].absent) pack.path("checkpoint")
        else folder.resolve(json["checkpoint"].text()).path,
    )
    val session: OrtTrainingSession
    val scheduled: Boolean

    init {
        val models = json["models"]
        val path = { key: String ->
            if (models[key].absent) pack.path(key) else folder.resolve(models[key].text()).path
        }
        session = if (models.absent || models.fields().isEmpty()) {
            OrtTrainingSession.create(env, pack, state, threads)
        } else {
            OrtTrainingSession.create(
                env, pack, state, path("training_model"), path("eval_model"),
                path("optimizer_model"), pack.sessionOptions(threads),
            )
        }
        if (!json["learning_rate"].absent) {
            session.learningRate = json["learning_rate"].number().toFloat()
        }
        val schedule = json["schedule"]
        scheduled = if (schedule.absent) session.restoreSchedule() else {
            val made = Schedule.from(schedule["kind"].text(), schedule["settings"], 0)
            session.setSchedule(made, schedule["initial_lr"].number())
            true
        }
    }

    override fun close() = session.close()
}

fun main(arguments: Array<String>) {
    val rest = arguments.drop(1)
    when (arguments[0]) {
        "conformance" -> conformance(File(rest[0]), "tolerance" in rest)
        "train" -> train(Json.read(rest[0].toByteArray()))
        "actions" -> actions(Json.read(rest[0].toByteArray()))
        "race" -> race(rest[0], rest[1].toInt(), Json.read(rest[2].toByteArray()))
        "resave" -> resave(rest[0], rest[1].toLong(), rest.drop(2))
        "faults" -> faults(
            File(rest[0]), rest[1], rest[2].toLong(), rest[3].toLong(), rest[4].toLong(),
            rest[5].toLong(),
        )
        "saves" -> saves(rest[0], rest[1].toLong(), rest[2])
        "load" -> load(rest[0])
        "keep" -> keep(rest[0], rest[1], rest[2].toLong())
        "export" -> export(rest[0], rest[1])
        "exports" -> exports(rest[0], rest[1], rest[2])
        "decoder" -> decoder(rest)
        "draws" -> draws(Json.read(rest[0].toByteArray()))
        "damaged" -> damaged(File(rest[0]))
        "hostile" -> hostile(File(rest[0]))
        "read" -> readAll(File(rest[0]))
        "benchmark" -> println(benchmark(env, rest[0], 1, 500_000_000))
        "signature" -> signature(rest[0], rest.drop(1))
        else -> throw IllegalArgumentException(arguments[0])
    }
}
