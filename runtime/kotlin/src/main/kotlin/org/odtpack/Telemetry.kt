package org.odtpack

import ai.onnxruntime.OrtEnvironment

private const val VARIABLE = "ORT_DISABLE_TELEMETRY"

/** The telemetry of ONNX Runtime, which its official builds send from 1.29 on. */
object Telemetry {
    /**
     * Keeps ONNX Runtime from sending anything on Android. Call it before the first
     * `OrtEnvironment`: of one that exists, a training session can only stop what comes later. Java
     * cannot set variables: on a JVM, start the process with `ORT_DISABLE_TELEMETRY=1`. An app that
     * wants telemetry sets the variable to 0.
     */
    @JvmStatic
    fun disable() {
        runCatching { // only Android has it
            Class.forName("android.system.Os")
                .getMethod("setenv", String::class.java, String::class.java, Boolean::class.java)
                .invoke(null, VARIABLE, "1", false)
        }
    }

    internal fun stop(env: OrtEnvironment) {
        if (System.getenv(VARIABLE) == null) env.setTelemetry(false)
    }
}
