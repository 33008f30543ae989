// The library inside the program: it needs no file beside the binary, and no directory from which programs may be run.
    .section .rodata
    .balign 64
    .global lockstep_bind_loopback
lockstep_bind_loopback:
    .incbin LOCKSTEP_BIND_LOOPBACK_FILE
    .global lockstep_bind_loopback_end
lockstep_bind_loopback_end:
    .byte 0
    .section .note.GNU-stack, "", %progbits
