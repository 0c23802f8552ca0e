@file:JvmName("Check")

package org.odtpack

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import kotlin.math.abs

/**
 * Train the package's made-up batch for a few steps and compare with what the build measured: tells
 * within seconds whether training is right on this device.
 *
 * @throws OdtpackException `self-check-failed`, or `no-self-check` if the package has none.
 */
@JvmOverloads
@Throws(OrtException::class)
fun selfCheck(env: OrtEnvironment, pack: TrainingPackage, threads: Int = 0) {
    val check = expectations(pack)
    OrtTrainingSession.create(env, pack, threads = threads).use { session ->
        withMadeUpBatch(env, pack) { batch ->
            session.learningRate = check["learning_rate"].number().toFloat()
            val wanted = check["losses"].list() + check["evaluation_loss"]
            val tolerances = check["tolerances"].list()
            for ((i, tolerance) in tolerances.withIndex()) {
                val last = i == wanted.size - 1
                val whole = session.accumulationSteps == 1L
                val result = when {
                    last -> session.evalStep(batch)
                    whole -> session.stepOn(batch)
                    else -> session.trainStep(batch)
                }
                val found = result.use(session::lossOf)
                if (!last && !whole) {
                    session.optimizerStep()
                    session.lazyResetGrad()
                }
                if (!(abs(found - wanted[i].number()) <= tolerance.number())) {
                    fail(
                        "self-check-failed", "Training is not right here: the loss " +
                            (if (last) "of the evaluation" else "of step ${i + 1}") +
                            " is $found, and should be ${wanted[i].number()}.", "",
                        "report the version of ONNX Runtime and the processor",
                    )
                }
            }
        }
    }
}

private fun expectations(pack: TrainingPackage): Json {
    val check = pack.manifest["self_check"]
    val reason = if (check.absent) "it was left out" else check["reason"].text("")
    if (reason.isNotEmpty()) fail("no-self-check", "The package has no self-check: $reason.")
    return check
}

/** Run something on a batch of 24 bits of a multiplicative hash of a counter for each element. */
private fun withMadeUpBatch(
    env: OrtEnvironment,
    pack: TrainingPackage,
    body: (Map<String, OnnxTensor>) -> Unit,
) {
    var counter = 0
    val batch = expectations(pack)["inputs"].list().associate { input ->
        val spec = pack.inputs.find { it.name == input["name"].text() }
            ?: Json.invalid("the self-check's inputs")
        val bound = if (spec.type == Type.BOOL) 2 else input["bound"].whole(1).coerceAtLeast(1)
        val shape = input["shape"].list().map { it.whole() }.toLongArray()
        val tensor = zeros(spec.type, shape)
        for (i in 0 until tensor.count.toInt()) {
            val bits = ((++counter * 2654435761).toInt() ushr 8).toLong()
            if (spec.type.floating) tensor.setReal(i, (bits - 8388608) / 8388608.0)
            else tensor.setWhole(i, bits % bound)
        }
        spec.name to tensor.onnx(env)
    }
    try {
        body(batch)
    } finally {
        batch.values.forEach(OnnxTensor::close)
    }
}

private fun Tensor.setWhole(index: Int, value: Long) {
    when (type.size) {
        1 -> data.put(index, value.toByte())
        2 -> data.putShort(2 * index, value.toShort())
        4 -> data.putInt(4 * index, value.toInt())
        else -> data.putLong(8 * index, value)
    }
}
