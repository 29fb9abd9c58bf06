// Runs kernels on the host, for a driver made for tests: the source of a cubin, as NVRTC for tests has kept it, is
// compiled as C++ behind device.hpp, once, and called. Variables: CUBINS, the folder of sources; EMULATOR, that of
// device.hpp; SEED, of the order in which threads run; EAGER, for what is asynchronous to happen at once; REPLACE and
// WITH, a text of kernels and what stands in its place, for tests that have to notice.
#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "host.hpp"

namespace {

// The end of what begins at `at`, behind the parenthesis that closes it.
size_t closed(const std::string& text, size_t at) {
    for (int depth = 1; depth > 0; ++at) {
        if (text[at] == '"') {
            for (++at; text[at] != '"'; ++at)
                if (text[at] == '\\') ++at;
        } else if (text[at] == '(') ++depth;
        else if (text[at] == ')') --depth;
    }
    return at;
}

// Parts of a text between `separator`s outside of brackets and literals.
std::vector<std::string> parts(const std::string& text, char separator) {
    std::vector<std::string> all(1);
    int depth = 0;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (c == '"') {
            const size_t from = i;
            for (++i; text[i] != '"'; ++i)
                if (text[i] == '\\') ++i;
            all.back() += text.substr(from, i - from + 1);
            continue;
        }
        if (std::strchr("([{", c)) ++depth;
        if (std::strchr(")]}", c)) --depth;
        if (c == separator && depth == 0) all.emplace_back();
        else all.back() += c;
    }
    return all;
}

bool is_blank(const std::string& text) { return text.find_first_not_of(" \n\t") == std::string::npos; }

// `"+f"(x)` as `emulated::out(x)`, and so on.
std::string operand(const std::string& text, bool is_output) {
    const size_t open = text.find('"'), close = text.find('"', open + 1);
    const std::string constraint = text.substr(open + 1, close - open - 1);
    const size_t first = text.find('(', close);
    const std::string inside = text.substr(first, text.rfind(')') - first + 1);
    if (is_output) return (constraint[0] == '+' ? "emulated::out" : "emulated::only_out") + inside;
    const char kind = constraint[0] == 'n' ? 'r' : constraint[0];
    return std::string("emulated::in_") + kind + inside;
}

// Inline assembly as calls, and smem as what the emulator has of it.
std::string translated(const std::string& source) {
    std::string to;
    size_t at = 0;
    int depth = 0;                         // of braces
    auto is_word = [&](size_t i, const char* word) {
        return source.compare(i, std::strlen(word), word) == 0 &&
               (i == 0 || !(std::isalnum((unsigned char)source[i - 1]) || source[i - 1] == '_'));
    };
    while (at < source.size()) {
        if (source.compare(at, 2, "//") == 0) {
            const size_t end = source.find('\n', at);
            at = end == std::string::npos ? source.size() : end;
        } else if (source[at] == '"') {
            size_t end = at + 1;
            for (; source[end] != '"'; ++end)
                if (source[end] == '\\') ++end;
            to += source.substr(at, end + 1 - at);
            at = end + 1;
        } else if (is_word(at, "asm volatile(") || is_word(at, "asm(")) {
            const size_t first = source.find('(', at) + 1, end = closed(source, first);
            const std::vector<std::string> all = parts(source.substr(first, end - 1 - first), ':');
            at = end;
            // Which only keeps a compiler from moving something.
            if (all[0] == "\"\"" || all[0] == "\"\" ") {
                to += "(void)0";
                continue;
            }
            to += "[&] { static const char* const text = " + all[0] +
                  "; static const emulated::Run run = emulated::instruction(text); run(text, {";
            for (size_t i = 1; i < all.size() && i < 3; ++i)
                for (const std::string& each : parts(all[i], ','))
                    if (!is_blank(each)) to += operand(each, i == 1) + ", ";
            to += "}); }()";
        } else if (is_word(at, "extern __shared__")) {
            // extern __shared__ [__align__(n)] T name[];
            const size_t end = source.find(';', at);
            std::string declared = source.substr(at + 17, end - at - 17);
            const size_t align = declared.find("__align__");
            if (align != std::string::npos) declared.erase(align, declared.find(')', align) + 1 - align);
            declared = declared.substr(0, declared.find('['));
            const size_t name = declared.find_last_of(" *") + 1;
            const std::string type = declared.substr(0, name);
            const std::string memory = "((" + type + "*)emulated::self->cta->shared)";
            // Of a whole file it is another CTA's at every look.
            if (depth == 0) to += "\n#define " + declared.substr(name) + " " + memory + "\n";
            else to += type + "* const " + declared.substr(name) + " = " + memory;
            at = end + (depth == 0);
        } else {
            depth += source[at] == '{' ? 1 : source[at] == '}' ? -1 : 0;
            to += source[at++];
        }
    }
    return to;
}

// The source with a line before each kernel that tells of it under its name, so that it can be called with an array of
// pointers to parameters.
std::string registered(const std::string& source) {
    std::string to;
    size_t done = 0;
    for (size_t at = source.find("extern \"C\" __global__"); at != std::string::npos;
         at = source.find("extern \"C\" __global__", at + 1)) {
        // extern "C" __global__ void [__launch_bounds__(...)] name(parameters)
        size_t from = source.find("void", at) + 4;
        const size_t bounds = source.find("__launch_bounds__(", from);
        if (bounds != std::string::npos && is_blank(source.substr(from, bounds - from)))
            from = closed(source, bounds + 18);
        const size_t open = source.find('(', from), end = closed(source, open + 1);
        std::string name = source.substr(from, open - from);
        name.erase(0, name.find_first_not_of(" \n"));
        std::string types, arguments;
        int count = 0;
        for (std::string each : parts(source.substr(open + 1, end - 2 - open), ',')) {
            if (is_blank(each)) continue;
            const size_t constant = each.find("__grid_constant__");
            if (constant != std::string::npos) each.erase(constant, 17);
            each = each.substr(0, each.find_last_not_of(" \n") + 1);
            each = each.substr(0, each.find_last_of(" *&\n") + 1);
            const std::string comma = types.empty() ? "" : ", ";
            arguments += comma + "*(std::remove_reference_t<" + each + ">*)p[" + std::to_string(count++) + "]";
            types += comma + each;
        }
        to += source.substr(done, at - done) + "extern \"C\" void " + name + "(" + types + ");\n";
        to += "static const bool is_" + name + "_known =\n    emulated::know(\"" + name + "\", [](void** p) { " + name +
              "(" + arguments + "); });\n";
        done = at;
    }
    return to + source.substr(done);
}

std::string variable(const char* name, const char* otherwise) {
    const char* text = std::getenv(name);
    return text ? text : otherwise;
}

// Bytes of a cubin: to the end of its last table or section.
size_t cubin_bytes(const char* file) {
    auto number = [&](size_t at, int width) {
        uint64_t n = 0;
        std::memcpy(&n, file + at, width);
        return n;
    };
    const size_t sections = number(40, 8), each = number(58, 2), count = number(60, 2);
    size_t end = std::max<size_t>(sections + each * count, number(32, 8) + number(54, 2) * number(56, 2));
    for (size_t i = 0; i < count; ++i) {
        const size_t section = sections + i * each;
        if (number(section + 4, 4) != 8) end = std::max<size_t>(end, number(section + 24, 8) + number(section + 32, 8));
    }
    return end;
}

std::string hash_of(const char* bytes, size_t count) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < count; ++i) hash = (hash ^ (unsigned char)bytes[i]) * 1099511628211u;
    char name[32];
    std::snprintf(name, sizeof name, "%016llx", (unsigned long long)hash);
    return name;
}

emulated::RunLaunch compiled(const char* cubin) {
    static std::map<const void*, emulated::RunLaunch> known;
    if (known.count(cubin)) return known[cubin];
    const std::string replaced = variable("REPLACE", ""), with = variable("WITH", "");
    const std::string kept = variable("CUBINS", ".") + ("/" + hash_of(cubin, cubin_bytes(cubin)));
    std::ifstream file(kept + ".cu");
    if (!file) std::fprintf(stderr, "emulated GPU: there is no source %s.cu\n", kept.c_str()), std::abort();
    std::stringstream text;
    text << file.rdbuf();
    std::string source = text.str(), at = kept;
    const size_t place = replaced.empty() ? std::string::npos : source.find(replaced);
    if (place != std::string::npos) {
        source.replace(place, replaced.size(), with);
        at += "-" + hash_of(source.data(), source.size());
        std::fprintf(stderr, "emulated GPU: a kernel with a text replaced\n");
    }
    const std::string library = at + ".so";
    struct stat there;
    if (stat(library.c_str(), &there) != 0) {
        const std::string own = at + "." + std::to_string(getpid());
        std::ofstream(own + ".cpp") << "#include \"device.hpp\"\n" << registered(translated(source));
        const std::string options = "-std=c++17 -O1 -w -Wno-psabi -shared -fPIC -ffp-contract=off "
                                    "-fno-strict-aliasing -fno-threadsafe-statics -fvisibility=hidden "
                                    "-U_FORTIFY_SOURCE";
        auto quoted = [](const std::string& path) { return " '" + path + "'"; };
        const std::string command = "c++ " + options + " -I" + quoted(variable("EMULATOR", ".")) + " -o" + quoted(own) +
                                    quoted(own + ".cpp") + " && mv" + quoted(own + ".cpp") + quoted(at + ".cpp") +
                                    " && mv" + quoted(own) + quoted(library);
        if (std::system(command.c_str()) != 0)
            std::fprintf(stderr, "emulated GPU: %s.cpp does not compile\n", own.c_str()), std::abort();
    }
    void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!opened) std::fprintf(stderr, "emulated GPU: %s\n", dlerror()), std::abort();
    return known[cubin] = reinterpret_cast<emulated::RunLaunch>(dlsym(opened, "emulated_run"));
}

// Stacks, which are used again; below each is a page that nobody may touch.
char* stack_of(size_t number) {
    constexpr size_t GUARD = 4096;
    static std::vector<char*> stacks;
    while (stacks.size() <= number) {
        void* const made = mmap(nullptr, GUARD + emulated::STACK, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED || mprotect(made, GUARD, PROT_NONE))
            std::fprintf(stderr, "emulated GPU: no memory for the stacks of %zu threads\n", number + 1), std::abort();
        stacks.push_back(static_cast<char*>(made) + GUARD);
    }
    return stacks[number];
}

}  // namespace

extern "C" void tell_of_memory(unsigned long long);

extern "C" void run_kernel(const void* cubin, const char* name, const unsigned* grid, unsigned threads, unsigned shared,
                           void** p) {
    static unsigned long long launches;
    const unsigned long long seed = std::strtoull(variable("SEED", "1").c_str(), nullptr, 10) + launches++;
    // CTAs that wait for one another all run at once.
    const unsigned together = std::max(8, std::atoi(variable("SMS", "8").c_str()));
    const bool is_eager = variable("EAGER", "0") != "0";
    compiled(static_cast<const char*>(cubin))({name, grid, threads, shared, p, seed, is_eager, together},
                                              {stack_of, tell_of_memory});
}
