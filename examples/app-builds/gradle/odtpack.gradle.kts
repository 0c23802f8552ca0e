// Builds a training package from a recipe and adds it to the assets, as assets/odtpack.
//
// In the module's build.gradle.kts:
//
//     apply(from = "odtpack.gradle.kts")
//     android {
//         sourceSets["main"].assets.srcDir(layout.buildDirectory.dir("odtpack/assets"))
//         androidResources { noCompress += listOf("onnx", "ort", "checkpoint", "checkpoint.data", "weights") }
//     }
//
// Inputs and outputs are declared: Gradle skips the task while they are unchanged, and takes
// the outputs from its build cache on other machines. Paths can be set in gradle.properties:
// odtpack.recipe, odtpack.package.training (folder of recipe, model and external data), odtpack.command.

val training = layout.projectDirectory.dir(
    providers.gradleProperty("odtpack.package.training").getOrElse("training")
)
val recipe = training.file(providers.gradleProperty("odtpack.recipe").getOrElse("recipe.toml"))
val odtpack = providers.gradleProperty("odtpack.command").getOrElse("odtpack")
val built = layout.buildDirectory.dir("odtpack/package")
val assets = layout.buildDirectory.dir("odtpack/assets/odtpack")

val odtpackVersion = providers.exec { commandLine(odtpack, "--version") }.standardOutput.asText

val odtpackBuild = tasks.register<Exec>("odtpackBuild") {
    group = "build"
    description = "Builds the training package of a recipe."
    inputs.files(fileTree(training) { include("**/*.toml", "**/*.onnx", "**/*.data") })
        .withPropertyName("training")
        .withPathSensitivity(PathSensitivity.RELATIVE)
    inputs.property("version", odtpackVersion)
    outputs.dir(built)
    outputs.cacheIf { true }
    commandLine(
        odtpack, "build", "--recipe", recipe.asFile.path,
        "--out", built.get().asFile.path, "--if-changed",
    )
}

val odtpackInstall = tasks.register<Exec>("odtpackInstall") {
    group = "build"
    description = "Copies what a phone needs of the training package into the assets."
    dependsOn(odtpackBuild)
    inputs.dir(built).withPropertyName("package").withPathSensitivity(PathSensitivity.RELATIVE)
    outputs.dir(assets)
    outputs.cacheIf { true }
    commandLine(
        odtpack, "install", built.get().asFile.path, "--android", assets.get().asFile.path,
    )
}

tasks.matching { it.name == "preBuild" }.configureEach { dependsOn(odtpackInstall) }
