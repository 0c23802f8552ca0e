"""Conan 2: ``conan create runtime/cpp``. ONNX Runtime and flatbuffers are those of the app."""

from pathlib import Path

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy


class Odtpack(ConanFile):
    """The headers of the C++ kit and their CMake package."""

    name = "odtpack"
    version = "0.1.0"
    description = "Trains odtpack packages on the ONNX Runtime that an app already ships."
    license = "Apache-2.0"
    url = "https://odtpack.example"
    package_type = "header-library"
    settings = "os", "compiler", "build_type", "arch"
    exports_sources = "CMakeLists.txt", "cmake/*", "include/*", "src/*"

    def export_sources(self):
        """Export the licence and the kernels too, which lie elsewhere in the repository."""
        root = Path(self.recipe_folder).parents[1]
        copy(self, "native/*", src=str(root / "runtime"), dst=self.export_sources_folder)
        copy(self, "LICENSE", src=str(root), dst=self.export_sources_folder)

    def generate(self):
        """Configure without what the app brings."""
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["ODTPACK_BUILD_APP"] = "OFF"
        for name in ("ONNXRUNTIME_LIBRARY", "ONNXRUNTIME_INCLUDE_DIR", "FLATBUFFERS_INCLUDE_DIR"):
            toolchain.cache_variables[name] = "/of-the-app"
        toolchain.generate()

    def package(self):
        """Install."""
        cmake = CMake(self)
        cmake.configure()
        cmake.install()
        target = Path(self.package_folder, "licenses")
        copy(self, "LICENSE", src=self.source_folder, dst=str(target))

    def package_id(self):
        """Headers are the same for all."""
        self.info.clear()

    def package_info(self):
        """Lead find_package to the kit's own CMake package."""
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs.append("share/cmake/odtpack")
