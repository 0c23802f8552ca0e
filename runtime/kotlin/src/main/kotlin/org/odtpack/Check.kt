@file:JvmName("Check")

package org.odtpack

import ai.onnxruntime.*
import kotlin.math.abs

/**
 * Train the package's made-up batch for a few steps and compare with what the build measured: tells
 * within seconds whether training is right on this device.
 *
 * @throws OdtpackException `self-check-failed`, or `no-self-check` if the package has none.
 */
@JvmOverloads @Throws(OrtException::class)
fun selfCheck(env: OrtEnvironment, pack: TrainingPackage, threads: Int = 0) {
    val check = pack.manifest["self_check"]
    val reason = if (check.absent) "it was left out" else check["reason"].text("")
    if (reason.isNotEmpty()) fail("no-self-check", "The package has no self-check: $reason.")
    val losses = check["losses"].list()
    val tolerances = check["tolerances"].list()
    OrtTrainingSession.create(env, pack, threads = threads).use { session ->
        session.learningRate = check["learning_rate"].number().toFloat()
        val batch = madeUpBatch(env, pack, check["inputs"])
        try {
            val compare = { found: Double, wanted: Json, tolerance: Json, what: String ->
                if (!(abs(found - wanted.number()) <= tolerance.number())) {
                    fail("self-check-failed", "Training is not right here: the loss of $what is $found, and should " +
                        "be ${wanted.number()}.", "report the version of ONNX Runtime and the processor")
                }
            }
            for ((i, wanted) in losses.withIndex()) {
                val whole = pack.accumulationSteps == 1L
                val loss = (if (whole) session.stepOn(batch) else session.trainStep(batch)).use(session::lossOf)
                if (!whole) {
                    session.optimizerStep()
                    session.lazyResetGrad()
                }
                compare(loss, wanted, tolerances[i], "step ${i + 1}")
            }
            val loss = session.evalStep(batch).use(session::lossOf)
            compare(loss, check["evaluation_loss"], tolerances.last(), "the evaluation")
        } finally {
            batch.values.forEach(OnnxTensor::close)
        }
    }
}

/** A batch of 24 bits of a multiplicative hash of a counter for each element. */
private fun madeUpBatch(env: OrtEnvironment, pack: TrainingPackage, inputs: Json): Map<String, OnnxTensor> {
    var counter = 0
    return inputs.list().associate { input ->
        val spec = pack.inputs.find { it.name == input["name"].text() } ?: Json.invalid("the self-check's inputs")
        val bound = if (spec.type == Type.BOOL) 2 else input["bound"].whole(1).coerceAtLeast(1)
        val tensor = zeros(spec.type, input["shape"].wholes())
        for (i in 0 until tensor.count.toInt()) {
            val bits = ((++counter * 2654435761).toInt() ushr 8).toLong()
            tensor[i] = if (spec.type.floating) (bits - 8388608) / 8388608.0 else (bits % bound).toDouble()
        }
        spec.name to tensor.onnx(env)
    }
}
