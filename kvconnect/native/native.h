/* What the sources of kvconnect._native share. */
#ifndef KVCONNECT_NATIVE_H
#define KVCONNECT_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* One byte run of every block: block b owns [offset + b * stride, + length). */
typedef struct {
    int64_t offset, stride, length;
} Segment;

/* Returns the number of int64 values, or -1 with an exception set. */
Py_ssize_t acquire_int64(PyObject *object, const char *name, Py_buffer *view);

/* Python's view of these is in _native.pyi. */
PyObject *send_pages(PyObject *module, PyObject *args);
PyObject *recv_pages(PyObject *module, PyObject *args);
PyObject *digest_pages(PyObject *module, PyObject *args);

/* Adds the class Relay to the module; -1 with an exception set. */
int add_relay(PyObject *module);

#endif
