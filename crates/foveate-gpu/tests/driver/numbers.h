/* Numbers of the types that device memory holds, by their places in cudaDataType_t. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { F32 = 0, F16 = 2, U8 = 8, I32 = 10, BF16 = 14 };

static double half(uint16_t h) {
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double x = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return h >> 15 ? -x : x;
}

/* Rounded to the nearest, ties to even; for numbers that f16 holds. */
static uint16_t to_half(double value) {
    int exponent;
    frexp(value, &exponent);
    exponent = exponent < -13 ? -13 : exponent;
    double units = rint(ldexp(fabs(value), 11 - exponent));
    if (units >= 2048) units /= 2, exponent++;
    uint16_t h = units < 1024 ? (uint16_t)units : (uint16_t)((exponent + 14) << 10 | ((int)units & 1023));
    return value < 0 ? h | 0x8000 : h;
}

static double get(const void *p, int64_t i, int64_t type) {
    float x;
    switch (type) {
    case F32: return ((const float *)p)[i];
    case F16: return half(((const uint16_t *)p)[i]);
    case U8: return ((const uint8_t *)p)[i];
    case I32: return ((const int32_t *)p)[i];
    }
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    return memcpy(&x, &bits, 4), x;
}

static void put(void *p, int64_t i, int64_t type, double value) {
    float x = (float)value;
    uint32_t bits;
    switch (type) {
    case F32: ((float *)p)[i] = x; return;
    case F16: ((uint16_t *)p)[i] = to_half(value); return;
    case U8: ((uint8_t *)p)[i] = (uint8_t)value; return;
    case I32: ((int32_t *)p)[i] = (int32_t)value; return;
    }
    memcpy(&bits, &x, 4);
    ((uint16_t *)p)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
