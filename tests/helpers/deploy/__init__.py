"""What the tests of the deployment files share."""
