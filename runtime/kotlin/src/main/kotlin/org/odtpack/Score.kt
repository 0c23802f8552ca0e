package org.odtpack

import ai.onnxruntime.*
import ai.onnxruntime.OrtSession.Result

/** Counts right answers, where the model has labels and an output with a score for each class. */
internal class Score(pack: TrainingPackage) {
    private val labels = pack.inputs.find { it.role == "labels" && it.classCount > 0 }
    private val scores = pack.evaluationOutputs.find {
        it.role == "prediction" && it.type.floating && it.shape.size > 1 && it.shape[1] == labels?.classCount &&
            it.shape.size == labels.shape.size + 1
    }
    private var right = 0L
    private var counted = 0L

    val accuracy get() = if (counted > 0) right.toDouble() / counted else null

    fun add(batch: Map<String, OnnxTensorLike>, result: Result) {
        if (labels == null || scores == null || labels.type != Type.INT64) return
        val truth = (batch.getValue(labels.name) as OnnxTensor).longBuffer
        val output = result.get(scores.name).orElse(null) as OnnxTensor? ?: return
        val values = Tensor(scores.type, output.shape, output.byteBuffer)
        val classes = labels.classCount.toInt()
        val inner = values.shape.drop(2).fold(1L, Long::times).toInt()
        for (i in 0 until truth.remaining()) {
            if (truth.get(i) == labels.ignored) continue
            val start = i / inner * classes * inner + i % inner
            // As numpy: of equal ones the first, 0 and -0 among them, and NaN before all others.
            val best = (0 until classes).maxByOrNull { values.real(start + it * inner) + 0.0 }
            counted++
            if (best?.toLong() == truth.get(i)) right++
        }
    }
}
