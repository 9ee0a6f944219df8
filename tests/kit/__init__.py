"""What tests are made of: both frameworks' calls, small nets and their trainings, records and runs made by hand."""
