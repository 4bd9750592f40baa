# For CMAKE_PROJECT_INCLUDE, of a build of llama-cpp-python for VUA. It leaves out more than half:
# llama.cpp's helpers for its own programs, and its library for images, which `Llama` does not load for
# text. (llama-cpp-python overrides LLAMA_BUILD_COMMON given as -D, but not a variable set here.)
set(LLAMA_BUILD_COMMON OFF)
set(LLAVA_BUILD OFF)
# llama.cpp's code for AMX ends with "Illegal instruction", at least by GCC 12: it drops the stores of
# what the tiles' configuration is read from (github.com/ggml-org/llama.cpp/pull/26954, open).
add_compile_options(-U__AMX_INT8__)
