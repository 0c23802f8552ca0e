#define ODTPACK_LOOPS kProduct_baseline
#define ODTPACK_WIDTH 4
#include "product_execute.inc"
