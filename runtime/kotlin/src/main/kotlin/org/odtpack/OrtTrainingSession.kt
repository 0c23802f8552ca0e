package org.odtpack

import ai.onnxruntime.*
import ai.onnxruntime.OrtSession.*
import java.io.File
import java.nio.ByteBuffer
import java.nio.file.Path
import java.util.function.BooleanSupplier

/** The mean loss, and the share of right answers where the model gives a score to each class. */
class Evaluation internal constructor(val loss: Double, val accuracy: Double?)

/**
 * Trains a package: `ai.onnxruntime.OrtTrainingSession` of 1.19 on a stock ONNX Runtime. Parameters
 * live in the state, as flat vectors in direct memory on which all models work in place.
 *
 * One call runs at a time, of all sessions of a state: another thread's is `busy` at once. [close]
 * waits for the call that runs; every later one is `closed`.
 *
 * A [Result] of a step has the loss first, in memory that the next step overwrites: read it with
 * [lossOf]. The model's other outputs are in it by name; close it as any result.
 */
class OrtTrainingSession private constructor(
    private val env: OrtEnvironment,
    private val pack: TrainingPackage,
    val checkpoint: OrtCheckpointState,
    options: SessionOptions,
    private val trainingModel: String,
    evaluationModel: String?,
    optimizerModel: String?,
    stepModel: String? = null,
    private val threads: Int = 0,
) : Properties(), AutoCloseable {
    private val state = checkpoint.state
    private val contiguous = Contiguous(pack.parameters, state)
    private val bound = HashMap<String, Memory>()
    private val opened = ArrayList<AutoCloseable>()
    private val reset = scalar(Type.BOOL, 1.0)
    private var segments: Segments? = null
    private var training: Graph? = null
    @Volatile private var step: StepModel? = null
    private var evaluation: Graph? = null
    @Volatile private var optimizer: Optimizer? = null // any thread may ask for the rate
    private var schedule: Pair<Schedule, Double>? = null
    private var pending = 0L // batches since the last reset, of trainBatch
    private val statistics by lazy {
        // Gradients that are not finite are to change the loss scale.
        val changed = pack.parameters.filter { it.role == "state" && !it.name.startsWith("mixed.") }
        Copy(changed.map { state.value(it.name) })
    }
    private val accumulated by lazy { Copy(listOf(state.gradients)) }
    @Volatile private var closed = false

    /** What a step does whose loss or gradients are not finite; in any case it changes nothing. */
    @Volatile var onNotFinite = OnNotFinite.SKIP

    /**
     * Batches whose loss or gradients were not finite, and which changed nothing. Of one of the step
     * model's some parameters may have been updated: [lastNotFinite].
     */
    @Volatile var skippedSteps = 0L
        private set

    /** The last loss or gradient that was not finite. */
    @Volatile var lastNotFinite: NotFinite? = null
        private set

    init {
        state.turn.take {
            val undo = state.undo()
            val undoAll = {
                close()
                undo()
            }
            undoing(undoAll) { make(options, evaluationModel, optimizerModel, stepModel) }
        }
    }

    private fun make(options: SessionOptions, evaluationModel: String?, optimizerModel: String?, stepModel: String?) {
        Telemetry.stop(env)
        val open = { path: String -> openSession(env, path, options).also(opened::add) }
        if (pack.hasSegments) segments = Segments(env, options, pack, trainingModel, evaluationModel).also(opened::add)
        val own = listOf(stepModel ?: trainingModel, evaluationModel).map { it.takeIf { segments == null } }
        val (trains, evaluates, updates) = (own + optimizerModel).map { it?.let(open) }
        val trainable = place(pack, state)
        for (spec in pack.parameters) {
            val value = state.value(spec.name)
            bind(spec.name, value)
            if (spec.role == "state") bind(spec.name + UPDATED, value)
        }
        bind("lazy_reset_grad", reset)
        if (stepModel == null) training = trainingGraph(trains)
        if (evaluationModel != null) evaluation = graph(evaluates, pack.evaluationOutputs, false)
        optimizer = updates?.let { Optimizer(env, it, pack.manifest, state, trainable).also(opened::add) }
        if (stepModel == null) {
            optimizer?.prepare()
        } else {
            val trained = trainable.associate { it.name to state.value(it.name) }
            step = StepModel(env, trains!!, pack, trained, optimizer(), bound)
            opened[opened.indexOf(trains)] = step!!
        }
    }

    /** Whether [stepOn] and [trainBatch] make steps in the package's step model. */
    val hasStepModel get() = step != null

    /**
     * An optimizer step on one batch: what [trainStep], [optimizerStep] and [lazyResetGrad] do, and
     * with less memory where the session has a step model. Returns what [trainStep] does; the loss
     * is that before the step. The error `step-of-several` if [accumulationSteps] is not 1.
     */
    @JvmOverloads @Throws(OrtException::class)
    fun stepOn(inputs: Map<String, OnnxTensorLike>, runOptions: RunOptions? = null): Result = own {
        optimizer().requireOwn()
        if (accumulationSteps > 1) {
            fail("step-of-several", "A step of this package takes $accumulationSteps batches, and each gradient is " +
                "divided by so many: one batch makes no step.", "call trainBatch for each batch")
        }
        state.requireValues()
        step?.let { return@own stepWith(it, inputs, runOptions) }
        val result = trainStep(inputs, runOptions)
        undoing(result::close) { optimizerStep(runOptions) }
        lazyResetGrad()
        result
    }

    private fun stepWith(model: StepModel, inputs: Map<String, OnnxTensorLike>, runOptions: RunOptions?): Result {
        checkBatch(pack.inputs, inputs)
        statistics.take()
        val result = undoing(statistics::putBack) { model.run(inputs, runOptions) }
        if (!hasFiniteLoss(result)) {
            statistics.putBack()
            return skipped(result, "loss-not-finite", emptyList())
        }
        val kept = model.kept()
        val step = stepCount + 1
        if (kept.isEmpty() || kept.size < pack.trainable.size) optimizer().advance()
        return if (kept.isEmpty()) result else skipped(result, "gradient-not-finite", kept, step)
    }

    /**
     * The loss and gradients of a batch, which are added to those that are accumulated. The first
     * call closes the step model, if there is one, and opens the training model: from then on all
     * steps are made with that.
     */
    @JvmOverloads @Throws(OrtException::class)
    fun trainStep(
        inputs: Map<String, OnnxTensorLike>,
        requestedOutputs: Set<String>? = null,
        pinnedOutputs: Map<String, OnnxValue> = emptyMap(),
        runOptions: RunOptions? = null,
    ): Result = own {
        state.requireValues()
        checkBatch(pack.inputs, inputs)
        checkOutputs(pack.outputs, requestedOutputs.orEmpty(), pinnedOutputs)
        val model = training ?: openTraining()
        if (state.spoiled && adds()) lazyResetGrad() // by another session
        val adds = adds()
        statistics.take()
        if (adds) accumulated.take()
        val putBack = {
            statistics.putBack()
            if (adds) accumulated.putBack() else state.dropGradients()
        }
        val result = undoing(putBack) { model.run(inputs, requestedOutputs, pinnedOutputs, runOptions) }
        val hasLoss = hasFiniteLoss(result)
        if (hasLoss && isFinite(state.gradients)) {
            reset[0] = 0.0
            state.spoiled = false
            return@own result
        }
        val names = if (!hasLoss) emptyList() else
            pack.trainable.filter { !isFinite(state.gradients.from(it.offset, it.shape)) }.map { it.name }
        putBack()
        skipped(result, if (hasLoss) "gradient-not-finite" else "loss-not-finite", names)
    }

    @Throws(OrtException::class)
    fun trainStep(inputs: Map<String, OnnxTensorLike>, runOptions: RunOptions?): Result =
        trainStep(inputs, null, emptyMap(), runOptions)

    @Throws(OrtException::class)
    fun trainStep(inputs: Map<String, OnnxTensorLike>, pinnedOutputs: Map<String, OnnxValue>): Result =
        trainStep(inputs, null, pinnedOutputs, null)

    /** The loss of a batch with the evaluation model. */
    @JvmOverloads @Throws(OrtException::class)
    fun evalStep(
        inputs: Map<String, OnnxTensorLike>,
        requestedOutputs: Set<String>? = null,
        pinnedOutputs: Map<String, OnnxValue> = emptyMap(),
        runOptions: RunOptions? = null,
    ): Result = own {
        state.requireValues()
        val model = evaluation ?: fail("no-eval-model", "No evaluation model was given.")
        checkBatch(pack.inputs, inputs)
        checkOutputs(pack.evaluationOutputs, requestedOutputs.orEmpty(), pinnedOutputs)
        model.run(inputs, requestedOutputs, pinnedOutputs, runOptions)
    }

    @Throws(OrtException::class)
    fun evalStep(inputs: Map<String, OnnxTensorLike>, runOptions: RunOptions?): Result =
        evalStep(inputs, null, emptyMap(), runOptions)

    @Throws(OrtException::class)
    fun evalStep(inputs: Map<String, OnnxTensorLike>, pinnedOutputs: Map<String, OnnxValue>): Result =
        evalStep(inputs, null, pinnedOutputs, null)

    /** Let the next training step replace the gradients, not add to them. */
    @Throws(OrtException::class)
    fun lazyResetGrad() = own {
        reset[0] = 1.0
        pending = 0
    }

    /**
     * Change the parameters by the accumulated gradients, which remain as they are. Nothing happens
     * where all steps since the last reset failed, or their loss or gradients were not finite.
     */
    @JvmOverloads @Throws(OrtException::class)
    fun optimizerStep(runOptions: RunOptions? = null) = own {
        optimizer().requireOwn()
        state.requireValues()
        if (!state.spoiled) optimizer().step(runOptions)
    }

    /** The loss of a step as a number. */
    @Throws(OrtException::class)
    fun lossOf(result: Result): Double = own {
        lossIn(result) ?: fail("bad-argument", "The result does not hold the loss, '${pack.outputs[0].name}'.",
            "name it among the outputs that the step is to return")
    }

    private fun lossIn(result: Result): Double? = (result.get(pack.outputs[0].name).orElse(null) as OnnxTensor?)?.let {
        if (it.info.onnxType == Type.DOUBLE.onnx) it.doubleBuffer.get(0)
        else it.floatBuffer.get(0).toDouble() // float16 as well
    }

    /** A loss that was not asked for counts as finite: a gradient shows what is wrong with it. */
    private fun hasFiniteLoss(result: Result) = lossIn(result)?.isFinite() != false

    /** Whether the next training step adds to the gradients. */
    private fun adds() = reset.data.get(0) == 0.toByte()

    private fun skipped(
        result: Result,
        code: String,
        names: List<String>,
        step: Long = (state.optimizer?.step ?: 0) + 1,
    ): Result {
        val found = NotFinite(code, step, names.take(MOST_NAMES))
        lastNotFinite = found
        skippedSteps++
        if (onNotFinite == OnNotFinite.STOP) result.use { found.raise() }
        return result
    }

    /**
     * One batch of a whole training: a training step, and after every [accumulationSteps] of them
     * an optimizer step, the schedule's step and a lazy reset; [stepOn] where it is every batch.
     * Returns the loss. The schedule stays where it is if there was nothing to step with.
     */
    @Throws(OrtException::class)
    fun trainBatch(inputs: Map<String, OnnxTensorLike>): Double = own {
        optimizer().requireOwn()
        val whole = accumulationSteps == 1L
        val before = stepCount
        try {
            val loss = (if (whole) stepOn(inputs) else trainStep(inputs)).use(::lossOf)
            if (++pending >= accumulationSteps) {
                pending = 0
                if (!whole) optimizerStep()
                if (!whole) lazyResetGrad()
            }
            loss
        } finally {
            if (schedule != null && stepCount != before) schedulerStep()
        }
    }

    /**
     * Train on batches as long as [isActive] says so, which is asked before each: a thread's
     * interruption, a job that was stopped, or `{ coroutineContext.isActive }`. Returns the number
     * of batches; the session is as after the last one.
     */
    @Throws(OrtException::class)
    fun fit(batches: Iterator<Map<String, OnnxTensorLike>>, isActive: BooleanSupplier): Int {
        var count = 0
        while (isActive.asBoolean && batches.hasNext()) {
            trainBatch(batches.next())
            count++
        }
        return count
    }

    /** The mean loss and the accuracy over batches; each sample counts alike. */
    @Throws(OrtException::class)
    fun evaluate(batches: Iterator<Map<String, OnnxTensorLike>>): Evaluation {
        var (loss, samples) = Pair(0.0, 0L)
        val score = Score(pack)
        for (batch in batches) {
            // As Python counts: along the first input that has an axis. What is missing, evalStep says.
            val size = pack.inputs.firstNotNullOfOrNull { batch[it.name]?.shape?.firstOrNull() } ?: 1
            own {
                evalStep(batch).use { result ->
                    loss += lossOf(result) * size
                    score.add(batch, result)
                }
            }
            samples += size
        }
        if (samples == 0L) fail("empty-batch", "There is no batch to evaluate.")
        return Evaluation(loss / samples, score.accuracy)
    }

    var learningRate: Float
        @Throws(OrtException::class) get() = optimizer().own.rate
        @Throws(OrtException::class) set(value) = own { optimizer().setRate(value) }

    /** Number of optimizer steps made, those before a resumed checkpoint included. */
    val stepCount: Long
        @Throws(OrtException::class) get() = optimizer().own.step

    /** Batches per optimizer step: the gradient of each is divided by this number. */
    val accumulationSteps = pack.accumulationSteps

    /** Let the rate follow a schedule, which is saved with the state. */
    @Throws(OrtException::class)
    fun setSchedule(schedule: Schedule, initialRate: Double): Unit = own {
        optimizer().checkRate(initialRate)
        this.schedule = Pair(schedule, initialRate)
        schedulerStep()
        state.properties[SCHEDULE_PROPERTY] = schedule.toJson(initialRate)
    }

    /** Go on with the schedule that the state was saved with; false if there is none. */
    @Throws(OrtException::class)
    fun restoreSchedule(): Boolean = own {
        val saved = state.properties[SCHEDULE_PROPERTY] ?: return@own false
        try {
            val json = Json.read((saved as? String ?: "").toByteArray())
            val settings = json.fields().minus(listOf("kind", "initial_lr")).mapValues { it.value.value }
            setSchedule(Schedule.from(json["kind"].text(), Json(settings), 0), json["initial_lr"].number())
        } catch (_: OdtpackException) {
            fail("bad-schedule", "The property $SCHEDULE_PROPERTY is not a schedule that this version knows.",
                "call setSchedule, which replaces it")
        }
        true
    }

    /** Follow the schedule that the package proposes, if any, over these steps if it is silent. */
    @Throws(OrtException::class)
    fun useProposedSchedule(totalSteps: Long): Boolean {
        val json = pack.manifest["schedule"].given ?: return false
        val schedule = Schedule.from(json["kind"].text(), json["settings"].given ?: Json.NOTHING, totalSteps)
        setSchedule(schedule, json["learning_rate"].number(0.001))
        return true
    }

    /**
     * Linear warm-up from 0 to the initial rate, then linear decay to 0. The rate counts as the
     * decimal number that it was written as: 0.001f is 0.001.
     */
    @Throws(OrtException::class)
    fun registerLinearLRScheduler(warmupStepCount: Long, totalStepCount: Long, initialLearningRate: Float) =
        setSchedule(Schedule.linear(warmupStepCount, totalStepCount), initialLearningRate.toString().toDouble())

    /** Set the rate of the next optimizer step. */
    @Throws(OrtException::class)
    fun schedulerStep() = own {
        val (schedule, initial) = schedule ?: fail("bad-schedule", "No schedule was set.")
        learningRate = (initial * schedule.factor(stepCount)).toFloat()
    }

    val trainInputNames: Set<String> = pack.inputs.map { it.name }.toSet()
    val trainOutputNames: Set<String> = pack.outputs.map { it.name }.toSet()
    val evalInputNames get() = trainInputNames
    val evalOutputNames: Set<String> = pack.evaluationOutputs.map { it.name }.toSet()

    /** All parameters, or the trainable ones, in the manifest's order and in the layout's type. */
    @Throws(OrtException::class)
    fun toBuffer(onlyTrainable: Boolean): ByteBuffer = own { contiguous.read(onlyTrainable) }

    /** Set the parameters from such a buffer. */
    @Throws(OrtException::class)
    fun fromBuffer(buffer: ByteBuffer, onlyTrainable: Boolean) = own { contiguous.write(buffer, onlyTrainable) }

    /** As [OrtCheckpointState.saveCheckpoint]. */
    @JvmOverloads @Throws(OrtException::class)
    fun saveCheckpoint(path: String, saveOptimizer: Boolean, keepPrevious: Boolean = false) = own {
        if (saveOptimizer) optimizer?.requireOwn()
        checkpoint.saveCheckpoint(path, saveOptimizer, keepPrevious)
    }

    @JvmOverloads @Throws(OrtException::class)
    fun saveCheckpoint(path: Path, saveOptimizer: Boolean, keepPrevious: Boolean = false) =
        saveCheckpoint(path.toString(), saveOptimizer, keepPrevious)

    /** Write an inference model with the current parameters inside, whole or not at all. */
    @Throws(OrtException::class)
    fun exportModelForInference(path: String, outputNames: Array<String>) = own {
        val parts = inferenceModel(pack, state, outputNames.asList())
        writeAtomically(File(path)) { file -> parts.forEach(file::writeAll) }
    }

    @Throws(OrtException::class)
    fun exportModelForInference(path: Path, outputNames: Array<String>) =
        exportModelForInference(path.toString(), outputNames)

    /** A session that predicts with a copy of the current parameters. */
    @Throws(OrtException::class)
    fun inferenceSession(vararg outputNames: String): OrtSession = own {
        val parts = inferenceModel(pack, state, outputNames.asList())
        val whole = ByteBuffer.allocate(parts.sumOf { it.remaining() })
        parts.forEach(whole::put)
        // Older bindings take no buffer here.
        SessionOptions().use { env.createSession(whole.array(), it) }
    }

    /**
     * Free what the session holds, once the call that runs has ended; the state remains, and can be
     * saved. Every later call is `closed`; closing again does nothing.
     */
    override fun close() {
        closed = true
        state.turn.await {
            opened.forEach(AutoCloseable::close)
            bound.values.forEach { it.value.close() }
            opened.clear()
            bound.clear()
        }
    }

    /** Make a call, in turn with those of other threads; a call within a call is a part of it. */
    override fun <T> own(body: () -> T): T {
        if (state.turn.isMine) return body()
        requireOpen() // before a call that runs, for which a close may be waiting
        return state.turn.take {
            requireOpen()
            body()
        }
    }

    private fun requireOpen() {
        if (closed) fail("closed", "The session is closed.", "make a new one")
    }

    override val values get() = state.properties

    /** Of a session, or of segments. */
    private fun graph(session: OrtSession?, outputs: List<Spec>, trains: Boolean): Graph {
        val parts = segments?.parts(trains) ?: listOf(Part(session!!))
        return Graph(env, parts, pack.inputs, outputs, bound, segments).also(opened::add)
    }

    /** The training model in the place of the step model. */
    private fun openTraining(): Graph {
        step?.also(opened::remove)?.close()
        step = null
        val session = pack.sessionOptions(threads).use { openSession(env, trainingModel, it) }
        opened.add(session)
        return trainingGraph(session).also { training = it }
    }

    private fun trainingGraph(session: OrtSession?): Graph {
        for (spec in pack.trainable) {
            val gradient = state.gradients.from(spec.offset, spec.shape)
            bind("${spec.name}_grad.accumulation.buffer", gradient)
            bind("${spec.name}_grad.accumulation.out", gradient)
        }
        return graph(session, pack.outputs, true)
    }

    private fun optimizer() =
        optimizer ?: fail("no-optimizer-model", "No optimizer model was given.", "pass optimizer_model.onnx")

    private fun bind(name: String, tensor: Tensor) {
        bound[name] = Memory(tensor, env)
    }

    companion object {
        private const val MOST_NAMES = 10

        /**
         * Train a package with its models and session options, from its checkpoint or another; with
         * its step model, where it has one.
         */
        @JvmStatic @JvmOverloads @Throws(OrtException::class)
        fun create(
            env: OrtEnvironment,
            pack: TrainingPackage,
            checkpoint: OrtCheckpointState = OrtCheckpointState.loadCheckpoint(pack.path("checkpoint")),
            threads: Int = 0,
        ): OrtTrainingSession = pack.sessionOptions(threads).use { options ->
            OrtTrainingSession(
                env, pack, checkpoint, options, pack.path("training_model"), pack.path("eval_model"),
                pack.path("optimizer_model"), pack.stepModel, threads,
            )
        }

        /** With models of the caller's choice: those in ORT format, for example. */
        @JvmStatic @JvmOverloads @Throws(OrtException::class)
        fun create(
            env: OrtEnvironment,
            pack: TrainingPackage,
            checkpoint: OrtCheckpointState,
            trainingModel: String,
            evaluationModel: String?,
            optimizerModel: String?,
            options: SessionOptions? = null,
        ): OrtTrainingSession = pack.sessionOptions().use { own ->
            OrtTrainingSession(env, pack, checkpoint, options ?: own, trainingModel, evaluationModel, optimizerModel)
        }

        /** The call of `OrtEnvironment` in 1.19; the models lie in their package's folder. */
        @JvmStatic @JvmOverloads @Throws(OrtException::class)
        fun createTrainingSession(
            env: OrtEnvironment,
            checkpointPath: String,
            trainPath: String,
            evalPath: String?,
            optimizerPath: String?,
            options: SessionOptions? = null,
        ): OrtTrainingSession {
            val pack = TrainingPackage.open(File(trainPath).absoluteFile.parent)
            val state = OrtCheckpointState.loadCheckpoint(checkpointPath)
            return create(env, pack, state, trainPath, evalPath, optimizerPath, options)
        }
    }
}
