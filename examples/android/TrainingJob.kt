package org.odtpack.sample

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import android.app.job.JobParameters
import android.app.job.JobService
import android.content.Context
import android.os.Build
import android.os.PowerManager
import android.util.Log
import java.io.File
import java.io.RandomAccessFile
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.channels.FileChannel
import java.util.concurrent.CopyOnWriteArraySet
import org.odtpack.OrtCheckpointState
import org.odtpack.OrtTrainingSession
import org.odtpack.Telemetry
import org.odtpack.TrainingPackage
import org.odtpack.selfCheck

private const val TAG = "Training"

/** Trains on a thread of its own for as long as the system lets it. */
class TrainingJob : JobService() {
    private var trainer: Trainer? = null

    override fun onStartJob(parameters: JobParameters): Boolean {
        val own = Trainer(applicationContext)
        trainer = own
        Thread({
            val finished = own.run()
            jobFinished(parameters, !finished) // not finished: when the conditions hold again
        }, TAG).start()
        return true
    }

    /** The phone is in use again, or was unplugged: there are seconds left to save. */
    override fun onStopJob(parameters: JobParameters): Boolean {
        trainer?.stop("the system takes the job back")
        return true
    }
}

/** One stretch of the training: from the last checkpoint on, until it is done or stopped. */
class Trainer(private val context: Context) {
    @Volatile
    private var reason: String? = null

    fun stop(why: String) {
        reason = why
    }

    /** Returns whether all steps are made. */
    fun run(): Boolean {
        running.add(this)
        try {
            return train()
        } catch (error: OrtException) {
            Log.e(TAG, "Training failed; the last checkpoint holds.", error)
            return true // not again tonight: it would fail again
        } finally {
            running.remove(this)
        }
    }

    private fun train(): Boolean {
        Telemetry.disable()
        val env = OrtEnvironment.getEnvironment()
        val folder = File(context.filesDir, "package").path
        val pack = TrainingPackage.unpack(folder, { context.assets.open("package/$it") })
        val saved = File(context.filesDir, "trained.ckpt")
        val resumed = saved.isFile
        if (!resumed) selfCheck(env, pack)
        val from = if (resumed) saved.path else pack.path("checkpoint")
        val state = OrtCheckpointState.loadCheckpoint(from)
        OrtTrainingSession.create(env, pack, state).use { session ->
            if (!resumed) session.registerLinearLRScheduler(10, STEPS, 0.001f)
            else session.restoreSchedule()
            val batches = Samples(context, env).batches(session.stepCount * session.accumulationSteps)
            do {
                // The step that is under way ends; then everything is saved, also when stopped.
                val trained = session.fit(batches.asSequence().take(SAVE_EVERY).iterator()) {
                    session.stepCount < STEPS && mayGoOn()
                }
                session.saveCheckpoint(saved.path, true)
            } while (trained == SAVE_EVERY)
            Log.i(TAG, "${session.stepCount} of $STEPS steps; ${reason ?: "done"}")
            if (session.stepCount < STEPS) return false
            val personal = File(context.filesDir, "personal.onnx").path
            session.exportModelForInference(personal, arrayOf("output"))
            return true
        }
    }

    private fun mayGoOn(): Boolean {
        if (Build.VERSION.SDK_INT >= Build.VERSION_CODES.Q) {
            val status = context.getSystemService(PowerManager::class.java).currentThermalStatus
            if (status >= PowerManager.THERMAL_STATUS_MODERATE) stop("the phone grows hot")
        }
        return reason == null
    }

    companion object {
        private const val STEPS = 2000L
        private const val SAVE_EVERY = 50
        private val running = CopyOnWriteArraySet<Trainer>()

        fun stopAll(why: String) = running.forEach { it.stop(why) }
    }
}

/** The app's samples, mapped from its files: tensors are views, and pages come and go. */
class Samples(context: Context, private val env: OrtEnvironment) {
    private val images = map(File(context.filesDir, "images.bin")).asFloatBuffer()
    private val labels = map(File(context.filesDir, "labels.bin")).asLongBuffer()
    private val pixels = images.capacity() / labels.capacity()

    /** Batches without end, from that of a step on. Each is closed when the next one is taken. */
    fun batches(step: Long): Iterator<Map<String, OnnxTensor>> = iterator {
        var start = (step * BATCH % (labels.capacity() / BATCH * BATCH)).toInt()
        while (true) {
            val image = images.duplicate()
            image.limit((start + BATCH) * pixels)
            image.position(start * pixels)
            val label = labels.duplicate()
            label.limit(start + BATCH)
            label.position(start)
            val side = Math.sqrt(pixels.toDouble()).toLong()
            val shape = longArrayOf(BATCH.toLong(), 1, side, side)
            OnnxTensor.createTensor(env, image, shape).use { input ->
                OnnxTensor.createTensor(env, label, longArrayOf(BATCH.toLong())).use { answers ->
                    yield(mapOf("input" to input, "labels" to answers))
                }
            }
            start = (start + BATCH) % (labels.capacity() / BATCH * BATCH)
        }
    }

    private fun map(file: File): ByteBuffer = RandomAccessFile(file, "r").use {
        it.channel.map(FileChannel.MapMode.READ_ONLY, 0, it.length()).order(ByteOrder.nativeOrder())
    }

    private companion object {
        const val BATCH = 32
    }
}
