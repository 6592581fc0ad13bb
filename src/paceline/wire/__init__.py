"""Operations that know where the workers are: those of one host meet in shared memory, hosts over the network."""
