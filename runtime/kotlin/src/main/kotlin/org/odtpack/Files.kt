package org.odtpack

import java.io.File
import java.io.IOException
import java.io.RandomAccessFile
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.channels.FileChannel
import java.nio.file.Files
import java.nio.file.StandardCopyOption
import java.nio.file.StandardOpenOption
import java.util.UUID

/** The bytes of a file, as pages of the file's own: they take no memory of the process. */
internal fun map(file: File): ByteBuffer {
    // A pipe would block.
    if (file.exists() && !file.isFile) throw IOException("${file.path} is not a file")
    RandomAccessFile(file, "r").use { opened ->
        val size = opened.length()
        if (size > Int.MAX_VALUE) throw IOException("${file.path} has $size bytes")
        return opened.channel.map(FileChannel.MapMode.READ_ONLY, 0, size)
            .order(ByteOrder.LITTLE_ENDIAN)
    }
}

internal fun FileChannel.writeAll(bytes: ByteBuffer) {
    while (bytes.hasRemaining()) write(bytes)
}

/** A link leads elsewhere, and so does a path with `..` in it. */
internal fun isLink(file: File): Boolean {
    val own = File(file.absoluteFile.parentFile!!.canonicalFile, file.name)
    return own.canonicalFile != own.absoluteFile
}

/**
 * Write a file whole or not at all: temporary, force, rename. The file that is replaced is kept
 * as [previous], if that is given.
 */
internal fun writeAtomically(target: File, previous: File? = null, body: (FileChannel) -> Unit) {
    val folder = target.absoluteFile.parentFile!!
    removeStale(folder, ".${target.name}.")
    val temporary = temporaryFor(target)
    try {
        if (target.isDirectory) throw IOException("it is a folder")
        RandomAccessFile(temporary, "rw").use {
            body(it.channel)
            it.channel.force(true)
        }
        if (previous != null && target.exists()) keep(target, previous)
        rename(temporary, target)
        forceFolder(folder)
    } catch (error: IOException) {
        notWritten(target, error)
    } finally {
        temporary.delete()
    }
}

internal fun notWritten(file: File, error: IOException): Nothing = fail(
    "file-not-written", "${file.path} could not be written: ${error.message}.", "",
    "check that the folder exists, is writable and has space left",
)

private fun temporaryFor(target: File): File {
    val random = UUID.randomUUID().toString().takeLast(12)
    return File(target.absoluteFile.parentFile, ".${target.name}.${ownProcess()}-$random.tmp")
}

/** Give a file a second name, so that one of the two always exists. */
private fun keep(target: File, previous: File) {
    val second = temporaryFor(target)
    try {
        link(target, second)
    } catch (_: IOException) { // a file system without hard links, such as FAT
        return rename(target, previous)
    }
    rename(second, previous)
    second.delete() // two names of one file: the rename did nothing
}

internal fun link(from: File, to: File) {
    try {
        Files.createLink(to.toPath(), from.toPath())
    } catch (_: LinkageError) { // Android before 26
        throw IOException("there are no hard links here")
    } catch (_: UnsupportedOperationException) {
        throw IOException("there are no hard links here")
    }
}

/** Whether two paths are names of one file. */
internal fun isSame(one: File, other: File) = try {
    Files.isSameFile(one.toPath(), other.toPath())
} catch (_: LinkageError) {
    false
}

private fun rename(from: File, to: File) {
    if (from.renameTo(to)) return // rename(2), which is all that Android has before 26
    try {
        Files.move(from.toPath(), to.toPath(), StandardCopyOption.ATOMIC_MOVE)
    } catch (_: LinkageError) {
        throw IOException("it could not be renamed")
    }
}

/** Make a rename durable, where the platform lets a folder be opened. */
internal fun forceFolder(folder: File) {
    try {
        FileChannel.open(folder.toPath(), StandardOpenOption.READ).use { it.force(true) }
    } catch (_: LinkageError) { // Android before 26
    } catch (_: IOException) { // Windows
    }
}

/** The number of this process, from Linux, which Android is; 0 elsewhere. */
private fun ownProcess() = File("/proc/self").canonicalFile.name.toIntOrNull() ?: 0

/** Remove temporary files that processes which no longer run left. */
private fun removeStale(folder: File, start: String) {
    if (ownProcess() == 0) return
    for (name in folder.list().orEmpty()) {
        val process = TEMPORARY.matchEntire(name.removePrefix(start))?.groupValues?.get(1)
        val stale = process != null && name.startsWith(start) && !File("/proc/$process").exists()
        if (stale) File(folder, name).delete()
    }
}

private val TEMPORARY = Regex("([1-9][0-9]{0,8})-[0-9a-f]{12}\\.tmp")
