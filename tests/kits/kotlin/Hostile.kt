import java.io.File
import java.nio.ByteBuffer
import java.security.MessageDigest
import org.odtpack.OdtpackException
import org.odtpack.OrtCheckpointState
import org.odtpack.OrtTrainingSession
import org.odtpack.State
import org.odtpack.TrainingPackage
import org.odtpack.readCheckpoint

/** What came of reading something: `ok` and what follows it, the code of an error, or a foreign one. */
private fun decision(read: () -> String): String = try {
    "ok" + read()
} catch (error: OdtpackException) {
    error.errorCode
} catch (error: Throwable) {
    "foreign:${error.javaClass.name}"
}

/** Print what is decided of each case of a corpus of hostile files. */
internal fun hostile(folder: File) {
    for (case in readJson(folder.resolve("index.json"))["cases"].list()) {
        val path = { key: String -> folder.resolve(case[key].text()).path }
        val found = decision {
            when (val action = case["action"].text()) {
                "open" -> TrainingPackage.open(path("package"))
                "checkpoint" -> readCheckpoint(path("checkpoint"))
                "session" -> {
                    val pack = TrainingPackage.open(path("package"))
                    val state = OrtCheckpointState.loadCheckpoint(path("checkpoint"))
                    OrtTrainingSession.create(env, pack, state, 1).close()
                }
                else -> throw IllegalArgumentException(action)
            }
            ""
        }
        println("${case["name"].text()}\t$found")
    }
}

/** Print what each checkpoint of a folder holds, and whether each manifest is valid. */
internal fun readAll(folder: File) {
    for (file in folder.listFiles()!!.sortedBy { it.name }) {
        val found = when (file.extension) {
            "ckpt" -> decision { "\t" + sha(described(readCheckpoint(file.path)).toByteArray()) }
            "json" -> decision {
                TrainingPackage.readManifest(file.readBytes(), folder.path)
                "\t-"
            }
            else -> continue
        }
        println("${file.name}\t$found")
    }
}

private fun hex(bytes: ByteArray) = bytes.joinToString("") { "%02x".format(it) }

private fun hex(text: String) = hex(text.toByteArray())

private fun sha(bytes: ByteArray) = hex(MessageDigest.getInstance("SHA-256").digest(bytes))

private fun sha(buffer: ByteBuffer) = sha(ByteArray(buffer.remaining()).also(buffer::get))

private fun bits(value: Float) = "%08x".format(value.toRawBits())

private fun described(state: State): String {
    val lines = ArrayList<String>()
    for ((name, each) in state.parameters.entries.sortedBy { hex(it.key) }) {
        val kind = if (each.trainable) "t" else "f"
        val shape = if (state.nominal) LongArray(0) else each.value.shape
        val dims = shape.joinToString("x").ifEmpty { "-" }
        lines.add("P $kind ${each.value.type.label} $dims ${sha(each.value.bytes())} ${hex(name)}")
    }
    state.optimizer?.let { optimizer ->
        lines.add("O ${optimizer.step} ${bits(optimizer.rate)}")
        for ((number, names) in optimizer.groups.withIndex()) {
            for (name in names.sortedBy(::hex)) {
                for ((index, moment) in optimizer.moments.getValue(name).withIndex()) {
                    lines.add("M $number momentum$index ${sha(moment.bytes())} ${hex(name)}")
                }
            }
        }
    }
    for ((name, value) in state.properties.entries.sortedBy { hex(it.key) }) {
        val text = when (value) {
            is Long -> "i $value"
            is Float -> "f ${bits(value)}"
            else -> "s ${hex(value as String)}"
        }
        lines.add("V $text ${hex(name)}")
    }
    return lines.joinToString("\n")
}
