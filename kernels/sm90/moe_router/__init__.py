"""A mixture of experts' router: scores of all experts, the choice, and the weights of those that are chosen."""
