// Trains the package on the samples in data/. An app passes its own samples instead.
import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import org.odtpack.OrtCheckpointState
import org.odtpack.OrtTrainingSession
import org.odtpack.TrainingPackage

/** An input, the shape of one of its samples, and all samples. */
class Input(val name: String, val type: OnnxJavaType, vararg val shape: Long) {
    private val data = File("data/$name.bin").readBytes().let {
        ByteBuffer.allocateDirect(it.size).order(ByteOrder.nativeOrder()).put(it)
    }
    private val bytes = type.size * shape.fold(1) { product, axis -> product * axis.toInt() }
    val samples get() = data.capacity() / bytes

    /** A view of some samples: nothing is copied. */
    fun part(env: OrtEnvironment, first: Int, count: Int): OnnxTensor {
        val view = data.duplicate().order(ByteOrder.nativeOrder())
        view.limit((first + count) * bytes).position(first * bytes)
        return OnnxTensor.createTensor(env, view, longArrayOf(count.toLong(), *shape), type)
    }
}

const val BATCH = @BATCH@
const val SAVED = "trained.ckpt"

fun main(arguments: Array<String>) {
    val steps = arguments.firstOrNull()?.toInt() ?: 100
    val inputs = listOf(
@INPUTS@
    )
    val samples = inputs[0].samples
    val env = OrtEnvironment.getEnvironment()
    val pack = TrainingPackage.open("package")
    val resumed = File(SAVED).isFile
    val state = OrtCheckpointState.loadCheckpoint(if (resumed) SAVED else pack.path("checkpoint"))
    OrtTrainingSession.create(env, pack, state).use { session ->
        if (resumed) {
            session.restoreSchedule()
        } else {
            state.addProperty("app.batches", 0)
            session.registerLinearLRScheduler(10, steps.toLong(), @RATE@f)
        }
        val each = session.accumulationSteps
        for (number in state.getIntProperty("app.batches") until steps * each) {
            val first = (number * BATCH % (samples - BATCH + 1)).toInt()
            val batch = inputs.associate { it.name to it.part(env, first, BATCH) }
            val loss = session.trainBatch(batch)
            batch.values.forEach { it.close() }
            state.addProperty("app.batches", number + 1)
            if ((number + 1) % (20 * each) == 0L) {
                println("${session.stepCount}: $loss")
                session.saveCheckpoint(SAVED, true)
            }
        }
        session.saveCheckpoint(SAVED, true)
        session.exportModelForInference("personal.onnx", arrayOf("output"))
    }
}
