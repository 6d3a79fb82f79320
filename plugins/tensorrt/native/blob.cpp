// The tables and the kernels themselves, as tables.py wrote them: -DTABLES names the file.
#include "tables.h"

__asm__(
    ".section .rodata\n"
    ".balign 64\n"
    "trtkv_tables:\n"
    ".incbin \"" TABLES "\"\n"
    ".byte 0\n"
    ".previous\n");
extern "C" char const trtkv_tables[] __attribute__((visibility("hidden")));

namespace trtkv {
Tables const& tables = *reinterpret_cast<Tables const*>(trtkv_tables);
}
