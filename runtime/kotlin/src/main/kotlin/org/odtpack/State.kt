package org.odtpack

import java.util.concurrent.locks.ReentrantLock
import kotlin.concurrent.withLock

internal const val OPTIMIZER_PROPERTY = "odtpack.optimizer" // of a file, not of a state
internal const val SCHEDULE_PROPERTY = "odtpack.schedule"

internal class Parameter(var value: Tensor, val trainable: Boolean)

/** What an optimizer carries from step to step, in the order of the file; no kind if unknown. */
internal class OptimizerState(
    @Volatile var step: Long, // any thread may read it, and the rate
    @Volatile var rate: Float,
    val moments: Map<String, List<Tensor>>,
    val groups: List<List<String>>,
    var kind: String = "",
)

/** One call at a time; a thread's calls may be within each other. */
internal class Turn {
    private val lock = ReentrantLock()

    /** Whether this thread makes a call. */
    val isMine get() = lock.isHeldByCurrentThread

    inline fun <T> take(body: () -> T): T {
        if (!lock.tryLock()) {
            fail("busy", "A call of this session, or of one with the same state, is still running.",
                "wait for it, or keep one thread for all calls of a session")
        }
        try {
            return body()
        } finally {
            lock.unlock()
        }
    }

    /** Do something once the call that runs has ended. */
    fun await(body: () -> Unit) = lock.withLock(body)
}

/**
 * Everything that training changes; without values if nominal. The trainable parameters and their
 * gradients are parts of two vectors, once a session placed them.
 */
internal class State(var nominal: Boolean) {
    /** For all sessions of it: they share its memory. */
    val turn = Turn()
    val parameters = LinkedHashMap<String, Parameter>()
    val properties = LinkedHashMap<String, Any>() // Long, Float or String
    var optimizer: OptimizerState? = null
    var flat: Tensor? = null
    var layout: Any? = null // where the package that placed it wants the parameters
    var spoiled = false // the gradients are of no use: the step that was to make them is void
    var checked = false // whether its file carried a digest, which was right
    var recovered: String? = null // what is wrong with the file in whose place it was loaded
    var whole: Any? = null // the identity of the file that was loaded or saved last

    private var made: Tensor? = null

    /** As large as [flat], and there only once something asks: direct memory is touched at once. */
    val gradients get() = made ?: zeros(flat!!.type, flat!!.shape).also { made = it }

    /** After a step that was to replace the gradients, and is void. */
    fun dropGradients() {
        spoiled = true
        gradients.bytes().run { while (hasRemaining()) putLong(0) } // multiples of 64 bytes
    }

    /** What a session undoes that cannot be made. Values stay where they are: the next moves them. */
    fun undo(): () -> Unit {
        val placed = flat != null
        val owned = optimizer.takeIf { placed } // that of an unplaced state was freed
        return {
            if (placed) optimizer = owned
            else {
                flat = null
                layout = null
                made = null
            }
        }
    }

    fun requireValues() {
        if (!nominal) return
        fail("nominal-state", "The parameters of a nominal checkpoint have no values.",
            "load a complete checkpoint, or all parameters with fromBuffer")
    }

    fun value(name: String): Tensor =
        parameters[name]?.value ?: fail("unknown-parameter", "The state has no parameter '$name'.")
}
