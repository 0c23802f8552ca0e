package org.odtpack

import ai.onnxruntime.OrtException
import kotlin.math.*

/**
 * A schedule of the learning rate: constant, linear, cosine, step or multistep, after a linear
 * warm-up. Counts are of optimizer steps.
 */
class Schedule @JvmOverloads @Throws(OrtException::class) constructor(
    val kind: String,
    val warmupSteps: Long = 0,
    val totalSteps: Long = 0,
    val floor: Double = 0.0,
    val period: Long = 0,
    val gamma: Double = 0.1,
    val milestones: List<Long> = emptyList(),
) {
    init {
        val good = when (kind) {
            "linear", "cosine" -> totalSteps >= maxOf(warmupSteps, 1)
            "step" -> period > 0
            "multistep" -> milestones.isNotEmpty() && milestones[0] >= 0
            else -> kind == "constant"
        }
        val last = maxOf(warmupSteps, totalSteps, period, milestones.lastOrNull() ?: 0)
        val inRange = warmupSteps >= 0 && last < 1L shl 53 && floor in 0.0..1.0 && gamma > 0 && gamma <= 1
        if (!good || !inRange || milestones != milestones.sorted()) {
            fail("bad-schedule", "The settings of the schedule '$kind' are out of range.",
                "linear and cosine end after the warm-up, a step has a period of 1 or more, and milestones rise")
        }
    }

    /** The fraction of the initial rate that holds after [step] steps. */
    fun factor(step: Long): Double {
        if (step < warmupSteps) return step.toDouble() / warmupSteps
        val over = step >= totalSteps
        val length = (totalSteps - warmupSteps).toDouble()
        return when (kind) {
            "step" -> gamma.pow((step / period).toDouble())
            "multistep" -> gamma.pow(milestones.count { it <= step }.toDouble())
            "linear" -> if (over) 0.0 else (totalSteps - step) / length
            "cosine" -> {
                val done = if (over) 1.0 else (step - warmupSteps) / length
                floor + (1 - floor) * ((1 + cos(PI * done)) / 2)
            }
            else -> 1.0
        }
    }

    /** The property of a state that keeps a schedule, with the rate at factor 1. */
    internal fun toJson(initialRate: Double): String {
        val all = mapOf("total_steps" to totalSteps, "floor" to repr(floor), "period" to period,
            "milestones" to milestones, "gamma" to repr(gamma))
        val fields = all.filterKeys(SETTINGS.getValue(kind)::contains) +
            mapOf("initial_lr" to repr(initialRate), "kind" to "\"$kind\"", "warmup_steps" to warmupSteps)
        return fields.toSortedMap().entries.joinToString(", ", "{", "}") { (key, value) -> "\"$key\": $value" }
    }

    companion object {
        @JvmStatic @Throws(OrtException::class)
        fun linear(warmupSteps: Long, totalSteps: Long) = Schedule("linear", warmupSteps, totalSteps)

        /** From settings; [total] counts if they do not say where the schedule ends. */
        internal fun from(kind: String, settings: Json, total: Long): Schedule {
            val own = SETTINGS[kind] ?: fail("bad-schedule", "There is no schedule '$kind'.")
            for ((key, value) in settings.fields()) {
                if (value.absent || (key != "warmup_steps" && key !in own)) {
                    fail("bad-schedule", "The schedule '$kind' has no setting '$key'.")
                }
            }
            return Schedule(
                kind, settings["warmup_steps"].whole(0), settings["total_steps"].whole(total),
                settings["floor"].number(0.0), settings["period"].whole(0), settings["gamma"].number(0.1),
                settings["milestones"].given?.wholes()?.asList().orEmpty(),
            )
        }

        private val SETTINGS = mapOf(
            "constant" to emptyList(), "linear" to listOf("total_steps"), "cosine" to listOf("total_steps", "floor"),
            "step" to listOf("period", "gamma"), "multistep" to listOf("milestones", "gamma"),
        )
    }
}
