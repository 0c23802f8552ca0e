package org.odtpack

import ai.onnxruntime.*
import ai.onnxruntime.OrtSession.*

private const val KEPT = "update.kept"

/**
 * A step model on the memory of the parameters that it updates, [trained], and of what their
 * optimizer keeps, which it adds to [bound]. New values are written over the old ones, in the
 * shapes that the model has for them: it may cut a matrix into parts. Closes its session.
 */
internal class StepModel(
    private val env: OrtEnvironment,
    private val session: OrtSession,
    pack: TrainingPackage,
    trained: Map<String, Tensor>,
    private val optimizer: Optimizer,
    private val bound: MutableMap<String, Memory>,
) : AutoCloseable {
    private val graph: Graph
    private val names = pack.trainable.map { it.name }
    private val isKept = zeros(Type.BOOL, longArrayOf(names.size.toLong()))

    init {
        for ((name, tensor) in optimizer.scalars()) bound[name] = Memory(tensor, env)
        val kept = optimizer.kept()
        for ((name, node) in session.inputInfo) kept[name]?.let { bind(name, it, node) }
        val updated = (trained + kept).toMutableMap()
        for ((name, node) in session.outputInfo.filterKeys { it.endsWith(UPDATED) }) {
            updated.remove(name.removeSuffix(UPDATED))?.let { bind(name, it, node) }
        }
        updated.keys.firstOrNull()?.let { mismatch("the step model does not update '$it'") }
        bound[KEPT] = Memory(isKept, env) // whatever else has that name
        graph = Graph(env, listOf(Part(session)), pack.inputs, pack.outputs, bound, hint = HALF_A_STEP)
    }

    /** Make a step, which counts once the optimizer advances. */
    fun run(batch: Map<String, OnnxTensorLike>, options: RunOptions?): Result {
        optimizer.prepareStep()
        return graph.run(batch, options = options)
    }

    /** Parameters that the last step left as they were, with what is kept of them. */
    fun kept(): List<String> = names.filterIndexed { i, _ -> isKept.data.get(i) != 0.toByte() }

    override fun close() {
        graph.close()
        session.close()
    }

    private fun bind(name: String, tensor: Tensor, node: NodeInfo) {
        val info = node.info as? TensorInfo ?: mismatch("'$name' is not a tensor")
        val own = tensor.reshaped(info.shape)
        val same = own.shape.all { it >= 0 } && own.count == tensor.count
        if (info.onnxType != own.type.onnx || !same) mismatch("the step model has another '$name'")
        bound[name] = Memory(own, env)
    }
}
