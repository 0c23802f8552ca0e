import java.io.File
import java.io.RandomAccessFile
import java.nio.ByteOrder
import java.nio.channels.FileChannel
import org.odtpack.OdtpackException
import org.odtpack.Save
import org.odtpack.State
import org.odtpack.readCheckpoint
import org.odtpack.readLastGood

/** The next number as the property `number` and as each element of each parameter. */
private fun count(state: State) {
    val number = state.properties["number"] as Long + 1
    for (parameter in state.parameters.values) {
        val all = FloatArray(parameter.value.count.toInt()).apply { fill(number.toFloat()) }
        parameter.value.bytes().order(ByteOrder.nativeOrder()).asFloatBuffer().put(all)
    }
    state.properties["number"] = number
}

private fun save(state: State, path: String, externalAbove: Long): String = try {
    Save(path, state, true, true).write(externalAbove)
    "written"
} catch (error: OdtpackException) {
    if ("may not survive a power cut" in error.message!!) "not durable" else error.errorCode
} catch (error: Throwable) {
    "foreign:$error"
}

/** Load a checkpoint, and save it to each of some paths; print what came of it. */
internal fun resave(path: String, externalAbove: Long, targets: List<String>) {
    val state = readLastGood(path)
    for (target in targets) {
        count(state)
        println(save(state, target, externalAbove))
    }
}

/** The number that a checkpoint holds throughout; a text that says what is wrong otherwise. */
private fun numberIn(path: String): String = try {
    val state = readCheckpoint(path)
    val number = state.properties["number"] as Long
    val whole = state.parameters.values.all { each ->
        (0 until each.value.count.toInt()).all { each.value.real(it) == number.toDouble() }
    }
    if (whole) "$number" else "torn"
} catch (error: OdtpackException) {
    error.errorCode
}

/**
 * Let each call of a save fail, one after the other, by the library of `tests/faults`, whose block
 * is [control]; print for each what the save says, the numbers of the checkpoint and of the one
 * before it, and the files that are left. [folder] is copied for each.
 */
internal fun faults(
    folder: File,
    control: String,
    externalAbove: Long,
    kinds: Long,
    error: Long,
    sticky: Long,
) {
    val block = RandomAccessFile(control, "rw").channel
        .map(FileChannel.MapMode.READ_WRITE, 0, 1096).order(ByteOrder.nativeOrder())
    val set = { field: Int, value: Long -> block.putLong(8 * field, value) }
    var at = 0L
    do {
        val scratch = File(folder.parentFile, "scratch")
        scratch.deleteRecursively()
        scratch.mkdirs()
        val copied = folder.listFiles()!!.sorted()
        for (file in copied) if (file.name != "ck.previous.data") file.copyTo(File(scratch, file.name))
        val shared = File(scratch, "ck.previous.data")
        if (File(folder, shared.name).exists()) {
            java.nio.file.Files.createLink(shared.toPath(), File(scratch, "ck.data").toPath())
        }
        val path = File(scratch, "ck").path
        val state = readLastGood(path)
        count(state)
        listOf(0L, kinds, at, 1L, error, sticky, 0L, 0L).forEachIndexed { i, each -> set(i, each) }
        (scratch.path + "\u0000").toByteArray().forEachIndexed { i, each -> block.put(72 + i, each) }
        set(0, 1)
        val said = save(state, path, externalAbove)
        set(0, 0)
        val hits = block.getLong(56)
        val left = scratch.list()!!.sorted().joinToString(",")
        println("$at\t$hits\t$said\t${numberIn(path)}\t${numberIn("$path.previous")}\t$left")
        at++
    } while (at == 1L || hits > 0)
}
