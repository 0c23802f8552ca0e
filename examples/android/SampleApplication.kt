package org.odtpack.sample

import android.app.Application
import android.app.job.JobInfo
import android.app.job.JobScheduler
import android.content.ComponentName

/** Schedules the training for every night, and passes the system's warnings on to it. */
class SampleApplication : Application() {
    override fun onCreate() {
        super.onCreate()
        val job = JobInfo.Builder(JOB, ComponentName(this, TrainingJob::class.java))
            .setRequiresCharging(true)
            .setRequiresDeviceIdle(true)
            .setPeriodic(24L * 60 * 60 * 1000)
            .build()
        getSystemService(JobScheduler::class.java).schedule(job)
    }

    /** Training is the first to give its memory back: the next job goes on from what is saved. */
    @Suppress("DEPRECATION") // Android 14 and later no longer send the levels of a running app
    override fun onTrimMemory(level: Int) {
        super.onTrimMemory(level)
        if (level >= TRIM_MEMORY_RUNNING_LOW && level != TRIM_MEMORY_UI_HIDDEN) {
            Trainer.stopAll("memory is short")
        }
    }

    private companion object {
        const val JOB = 1
    }
}
